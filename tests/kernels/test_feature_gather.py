"""The feature_gather kernels under emulation."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.emulation import ELEMENT_TYPES, FLOAT32, ElementType, Kernels

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

SHAPES = [  # rows, trees, features of a subset, features of hidden
    (5, 3, 4, 11),
    (1, 1, 1, 1),
    (1030, 2, 3, 5),  # more rows than rows of blocks
    (3, 2, 300, 300),  # several blocks of columns, every feature
    (0, 2, 3, 5),
    (4, 0, 3, 5),
    (4, 2, 0, 5),
]


def subsets(
    trees: int, features: int, in_features: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    random = np.random.default_rng(1)
    index = np.zeros((trees, features), np.int32)
    for tree in range(trees):
        index[tree] = np.sort(random.choice(in_features, features, replace=False))
    return index


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(
    kernels: Kernels, shape: tuple[int, int, int, int], kind: ElementType
) -> None:
    rows, trees, features, in_features = shape
    random = np.random.default_rng(2)
    index = subsets(trees, features, in_features)
    values = kind.encode(random.standard_normal((rows, in_features)))
    output = kernels.feature_gather(kind, values, index)
    np.testing.assert_array_equal(output, values[:, index])

    grad = kind.encode(random.standard_normal((rows, trees, features)))
    exact = kind.decode(grad)
    truth = np.zeros((rows, in_features))
    for tree in range(trees):
        truth[:, index[tree]] += exact[:, tree]
    grad_hidden = kind.decode(kernels.feature_gather_backward(kind, grad, index, in_features))
    np.testing.assert_allclose(grad_hidden, truth, rtol=kind.unit, atol=1e-6)


def test_same_bits_in_every_scheduling_order(kernels: Kernels) -> None:
    index = subsets(6, 20, 40)
    grad = np.random.default_rng(3).standard_normal((7, 6, 20)).astype(np.float32)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(kernels.feature_gather_backward(FLOAT32, grad, index, 40).tobytes())
    assert len(set(results)) == 1


def test_feature_out_of_range_gives_nan(kernels: Kernels) -> None:
    values = np.arange(10, dtype=np.float32).reshape(2, 5)
    index = np.array([[-(2**31), 0, 4, 5, 2**31 - 1]], np.int32)
    output = kernels.feature_gather(FLOAT32, values, index)
    np.testing.assert_array_equal(
        output[:, 0], values[:, [0, 0, 4, 0, 0]] * [np.nan, 1, 1, np.nan, np.nan]
    )
    kernels.feature_gather_backward(FLOAT32, np.ones((2, 1, 5), np.float32), index, 5)
