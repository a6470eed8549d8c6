"""The kernel of sparse_adam_ under emulation; see also tests/ops/test_sparse_adam.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_sparse_adam import RULE, SHAPES, check

from hstree.ops import sparse_adam_
from kernels.emulation import bits, check_every_order, emulated_tests

pytestmark = emulated_tests


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: Any) -> None:
    device = torch.device("cpu")
    check_every_order(library, lambda: check(case, torch.float32, device))


def test_packs_change_no_bit() -> None:
    """Rows that are not aligned to packs of four take the other kernel."""
    random = torch.Generator().manual_seed(5)
    arrays = [torch.rand(4 * 8, generator=random) for _ in range(3)]
    values = torch.randn(3, 8, generator=random)
    results = []
    for shift in (0, 1):
        tensors = [torch.cat([x.new_zeros(shift), x])[shift:].view(4, 8) for x in arrays]
        sparse_adam_(*tensors, torch.tensor([[0, 2, 3]]), values, step=1, **RULE)
        results.append(bits(tensors))
    assert results[0] == results[1]


def test_row_out_of_range_is_left_out() -> None:
    index = torch.tensor([[-1, 0, 0, 1, 2, 2**40], [0, -1, 3, 1, 0, 0]])
    tensors = [torch.ones(2, 3, 4) for _ in range(3)]
    sparse_adam_(*tensors, index, torch.ones(6, 4), step=1, **RULE)
    changed = tensors[0] != 1
    assert changed[1, 1].all()
    assert changed.sum() == 4
