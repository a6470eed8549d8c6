"""The references that all kernels are held against, themselves held against a walk of the trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hstree.reference import (
    feature_gather_reference,
    path_log_prob_reference,
    wide_log_prob_reference,
)
from hstree.trees import Tree

TREES = [
    ((0, 1), (2, (3, 4))),
    ((0, (1, 2, 3)), (4, 5)),
    (((0, 1, 2), 3, (4, 5, (6, 7, 8))), (9, 10, 11)),
]


@pytest.mark.parametrize("nested", TREES, ids=str)
@pytest.mark.parametrize("subset", [None, [1, 4]], ids=str)
def test_binary_and_wide_parts_multiply_to_the_distribution(nested: Any, subset: Any) -> None:
    tree = Tree.from_nested(nested)
    tables = tree.tables()
    random = np.random.default_rng(0)
    h = random.standard_normal(5)
    x = h if subset is None else h[subset]
    weight = random.standard_normal((tables.n_binary, len(x)))
    bias = random.standard_normal(tables.n_binary)
    wide_weight = random.standard_normal((tables.n_wide_rows, len(x)))
    wide_bias = random.standard_normal(tables.n_wide_rows)
    prob = np.zeros(tree.n_classes)
    nodes, rows = iter(range(100)), iter(range(100))

    def visit(item: Any, p: float) -> None:
        if not isinstance(item, tuple):
            prob[item] = p
            return
        if len(item) == 2:
            node = next(nodes)
            left = 1 / (1 + np.exp(-(weight[node] @ x + bias[node])))
            share = [left, 1 - left]
        else:
            mine = [next(rows) for _ in item]
            z = np.exp(wide_weight[mine] @ x + wide_bias[mine])
            share = (z / z.sum()).tolist()
        for child, s in zip(item, share, strict=True):
            visit(child, p * s)

    visit(nested, 1.0)
    np.testing.assert_allclose(prob.sum(), 1)
    target = torch.arange(-1, tree.n_classes)
    input = torch.from_numpy(np.tile(h, (len(target), 1)))
    index = None if subset is None else torch.tensor([subset], dtype=torch.int32)
    position = torch.tensor(tables.leaf_position)[None]
    log_prob, score = path_log_prob_reference(
        input, torch.from_numpy(weight)[None], torch.from_numpy(bias)[None], target,
        torch.tensor(tables.path_offset)[None], torch.tensor(tables.path), position, index,
        tables.max_depth,
    )  # fmt: skip
    wide_log_prob, wide_score = wide_log_prob_reference(
        input, torch.from_numpy(wide_weight)[None], torch.from_numpy(wide_bias)[None], target,
        torch.tensor(tables.wide_offset)[None], torch.tensor(tables.wide_path), position,
        index, tables.max_width,
    )  # fmt: skip
    assert log_prob[0] == wide_log_prob[0] == 0
    np.testing.assert_allclose((log_prob + wide_log_prob)[1:, 0].exp(), prob, rtol=1e-12)
    assert score.shape == (len(target), 1, tables.max_depth)
    assert wide_score.shape == (len(target), 1, tables.max_width)


def test_feature_gather() -> None:
    input = torch.arange(6.0).view(2, 3)
    index = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32)
    assert feature_gather_reference(input, index).tolist() == [
        [[0.0, 2.0], [1.0, 2.0]],
        [[3.0, 5.0], [4.0, 5.0]],
    ]
