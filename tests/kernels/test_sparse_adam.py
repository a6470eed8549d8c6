"""The kernel of sparse_adam_ under emulation; see also tests/ops/test_sparse_adam.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_emu.library import ORDERS
from ops.test_sparse_adam import check

from kernels.emulation import FLOAT32, Kernels

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

RULE = (0.05, 0.9, 0.99, 1e-3, 0.3)  # lr, beta1, beta2, eps, weight_decay


def test_same_bits_in_every_scheduling_order(kernels: Kernels) -> None:
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        with kernels.library.on_cpu_tensors():
            results.append(check(((3, 7, 8), 2, 11), torch.float32, torch.device("cpu")))
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_packs_change_no_bit(kernels: Kernels) -> None:
    """Rows that are not aligned to packs of four take the other kernel."""
    random = np.random.default_rng(5)
    index = np.array([[0, 2, 3]], np.int64)
    values = random.standard_normal((3, 8)).astype(np.float32)
    arrays = [random.random((4, 8)).astype(np.float32) for _ in range(3)]
    results = []
    for shift in (0, 1):
        buffer = np.empty((3, 4 * 8 + 8), np.float32)
        shift += -buffer.ctypes.data // 4 % 4
        tensors = tuple(row[shift : shift + 32].reshape(4, 8) for row in buffer)
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor[:] = array
        kernels.sparse_adam_(FLOAT32, tensors, index, values, RULE)
        results.append([tensor.tobytes() for tensor in tensors])
    assert results[0] == results[1]


def test_row_out_of_range_is_left_out(kernels: Kernels) -> None:
    index = np.array([[-1, 0, 0, 1, 2, 2**40], [0, -1, 3, 1, 0, 0]], np.int64)
    tensors = tuple(np.ones((2, 3, 4), np.float32) for _ in range(3))
    kernels.sparse_adam_(FLOAT32, tensors, index, np.ones((6, 4), np.float32), RULE)
    changed = tensors[0] != 1
    assert changed[1, 1].all()
    assert changed.sum() == 4
