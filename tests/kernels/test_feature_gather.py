"""The feature_gather kernels under emulation; see also tests/ops/test_feature_gather.py."""

from __future__ import annotations

import math

import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_feature_gather import batch

from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests
backward = torch.ops.hstree.feature_gather_backward


def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary) -> None:
    values, index, grad = batch(7, 6, 40, 20, torch.float32)
    gather = torch.ops.hstree.feature_gather
    check_every_order(library, lambda: [gather(values, index), backward(grad, index, 40)])


def check_out_of_range() -> None:
    """NaN, and no stray access."""
    values = torch.arange(10.0).view(2, 5)
    index = torch.tensor([[-(2**31), 0, 4, 5, 2**31 - 1]], dtype=torch.int32)
    expected = values[:, [0, 0, 4, 0, 0]]
    expected[:, [0, 3, 4]] = math.nan
    got = torch.ops.hstree.feature_gather(values, index)[:, 0]
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    backward(torch.ones(2, 1, 5), index, 5)


def test_feature_out_of_range_gives_nan() -> None:
    check_out_of_range()
