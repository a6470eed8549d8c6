"""The kernels of screened_topk under emulation; see also tests/ops/test_screened_topk.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_screened_topk import check, draw

from hstree.ops import screened_topk
from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests

# Shape as in ops.test_screened_topk, n, k.
CASES = {
    "groups of several blocks, one row": ((1, 3000, 24, 5), 10, 10),
    "groups of one block, two rows": ((2, 1000, 33, 8), 30, 1),
    "more classes than blocks, four rows": ((4, 500, 70, 3), 100, 20),
    "tiles of rows, the last not full": ((11, 300, 9, 16), 5, 2),
    "more rows than at a time": ((67, 40, 4, 4), 3, 3),
    "several chunks": ((1, 5000, 5, 2), 700, 700),
    "a sort outside shared memory": ((1, 8400, 3, 2), 8300, 4),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(case: str, bits: int) -> None:
    shape, n, k = CASES[case]
    arguments = draw(shape, bits)
    check(screened_topk(*arguments, n, k, all_scores=True), arguments, n, k, 1.0)


@pytest.mark.parametrize("case", list(CASES)[:3])
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: str) -> None:
    shape, n, k = CASES[case]
    arguments = draw(shape, 4, torch.bfloat16)
    check_every_order(library, lambda: screened_topk(*arguments, n, k, all_scores=True))


def test_misaligned_tables() -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)

    arguments: list[Any] = draw((5, 200, 20, 16), 4, torch.bfloat16)
    expected = screened_topk(*arguments, 9, 9, all_scores=True)
    found = screened_topk(*map(moved, arguments), 9, 9, all_scores=True)
    assert torch.equal(found.classes, expected.classes)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_signs_of_zero_make_no_difference() -> None:
    """Neither to previews nor to scores."""
    query, preview, scale, offset, hidden, weight, _ = draw((2, 100, 8, 1), 8)
    query.zero_()
    query[:, -1] = -0.0
    offset[:100] = torch.where(torch.arange(100) % 3 > 0, 0.0, -0.0)
    weight[:] = torch.where(torch.arange(100) % 2 > 0, 0.0, -0.0)[:, None]
    found = screened_topk(query, preview, 0 * scale, offset, hidden, weight, None, 40, 40)
    assert found.classes.tolist() == [list(range(40))] * 2


def test_a_score_that_is_nan_comes_first() -> None:
    arguments: list[Any] = draw((2, 50, 8, 4), 8)
    expected = screened_topk(*arguments, 50, 50)
    arguments[5][[20, 30]] = torch.nan
    found = screened_topk(*arguments, 50, 50)
    assert found.classes[:, :2].tolist() == [[20, 30]] * 2
    assert found.score[:, :2].isnan().all()
    assert found.log_normalizer.isnan().all()
    for got, want in zip(found.classes[:, 2:], expected.classes, strict=True):
        assert got.tolist() == [v for v in want.tolist() if v not in (20, 30)]
