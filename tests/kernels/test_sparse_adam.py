"""The kernel of sparse_adam_ under emulation."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.emulation import ELEMENT_TYPES, FLOAT32, ElementType, Kernels
from kernels.sparse_adam_cases import RULE, SPARSE_ADAM_SHAPES, Shape, check_sparse_adam

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SPARSE_ADAM_SHAPES, ids=str)
def test_equals_reference(kernels: Kernels, shape: Shape, kind: ElementType) -> None:
    check_sparse_adam(kernels, shape, kind)
    check_sparse_adam(kernels, shape, kind, maximize=True)


def test_same_bits_in_every_scheduling_order(kernels: Kernels) -> None:
    results = set()
    for order in ORDERS:
        kernels.set_order(*order)
        tensors = check_sparse_adam(kernels, (3, 7, 11, 8), FLOAT32)
        results.add(b"".join(array.tobytes() for array in tensors))
    assert len(results) == 1


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
