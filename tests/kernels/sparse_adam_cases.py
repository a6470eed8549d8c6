"""Shapes for the kernel of sparse_adam_, and a check against numpy in float64."""

from __future__ import annotations

import numpy as np

from kernels.emulation import Array, ElementType, Kernels

RULE = (0.05, 0.9, 0.99, 1e-3, 0.3)  # lr, beta1, beta2, eps, weight_decay

SPARSE_ADAM_SHAPES = [  # trees (None: an index of one dimension), rows, visited rows, features
    (3, 7, 11, 8),
    (3, 7, 11, 5),  # no whole packs
    (None, 40, 30, 1),
    (2, 300, 580, 1),  # several blocks of rows
    (1, 3, 2, 2060),  # several rounds of a block
    (2, 5, 10, 4),  # every row
    (2, 5, 0, 4),
    (2, 5, 3, 0),
]
Shape = tuple[int | None, int, int, int]


def check_sparse_adam(
    kernels: Kernels, shape: Shape, kind: ElementType, maximize: bool = False
) -> tuple[Array, ...]:
    """Twice the first step; returns weight, exp_avg and exp_avg_sq."""
    trees, rows, visited, features = shape
    random = np.random.default_rng(4)
    sizes = (rows, features) if trees is None else (trees, rows, features)
    weight = kind.encode(random.standard_normal(sizes))
    exp_avg = random.standard_normal(sizes).astype(kind.sums)
    exp_avg_sq = random.random(sizes).astype(kind.sums)
    tensors = (weight, exp_avg, exp_avg_sq)
    lr, beta1, beta2, eps, weight_decay = RULE
    for _ in range(2):
        place = np.sort(random.choice(np.prod(sizes[:-1]), visited, replace=False))
        index = np.array(np.unravel_index(place, sizes[:-1]), np.int64)
        values = kind.encode(random.standard_normal((visited, features)))
        w, m, v = kind.decode(weight), exp_avg.astype(np.float64), exp_avg_sq.astype(np.float64)
        g = kind.decode(values) * (-1 if maximize else 1)
        at = tuple(index)
        m[at] = beta1 * m[at] + (1 - beta1) * g
        v[at] = beta2 * v[at] + (1 - beta2) * g * g
        w[at] *= 1 - lr * weight_decay
        w[at] -= lr * m[at] / (1 - beta1) / (np.sqrt(v[at] / (1 - beta2)) + eps)
        before = [array.copy() for array in tensors]
        kernels.sparse_adam_(kind, tensors, index, values, RULE, maximize)
        sums = 1e-15 if kind.sums is np.float64 else 1e-6
        tolerance = max(kind.unit, sums) + sums
        np.testing.assert_allclose(kind.decode(weight), w, rtol=tolerance, atol=sums)
        np.testing.assert_allclose(exp_avg, m, rtol=sums, atol=sums)
        np.testing.assert_allclose(exp_avg_sq, v, rtol=sums, atol=sums)
        other = np.ones(sizes[:-1], bool)
        other[at] = False
        for array, old in zip(tensors, before, strict=True):
            assert array[other].tobytes() == old[other].tobytes()
    return tensors
