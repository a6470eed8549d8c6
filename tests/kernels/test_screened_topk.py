"""The kernels of screened_topk under emulation; see also tests/ops/test_screened_topk.py."""

from __future__ import annotations

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_screened_topk import CASES, draw

from hstree.ops import screened_topk
from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests


@pytest.mark.parametrize("case", list(CASES)[:4])
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: str) -> None:
    shape, n, k = CASES[case]
    arguments = draw(shape, 4, torch.bfloat16)
    check_every_order(library, lambda: screened_topk(*arguments, n, k, all_scores=True))
