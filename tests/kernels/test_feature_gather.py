"""The feature_gather kernels under emulation; see also tests/ops/test_feature_gather.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_emu.library import ORDERS
from ops.test_feature_gather import batch

from kernels.emulation import FLOAT32, Kernels

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute


def test_same_bits_in_every_scheduling_order(kernels: Kernels) -> None:
    _, index, grad = batch(7, 6, 40, 20, torch.float32)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(
            kernels.feature_gather_backward(FLOAT32, grad.numpy(), index.numpy(), 40).tobytes()
        )
    assert len(set(results)) == 1


def test_feature_out_of_range_gives_nan(kernels: Kernels) -> None:
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    index = np.array([[-(2**31), 0, 4, 5, 2**31 - 1]], np.int32)
    output = kernels.feature_gather(FLOAT32, values, index)
    np.testing.assert_array_equal(
        output[:, 0], values[:, [0, 0, 4, 0, 0]] * [np.nan, 1, 1, np.nan, np.nan]
    )
    kernels.feature_gather_backward(FLOAT32, np.ones((2, 1, 5), np.float32), index, 5)
