"""Forward and backward of one Huffman tree against torch's flat loss and torch's own vectorised
tree, one core.

pytest benchmarks/test_path.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.baselines import flat_loss, torch_tree_loss
from benchmarks.contest import batch, step
from hstree.heads.tree_layout import stack_tables
from hstree.ops import path_log_prob
from hstree.trees import build_ensemble

# (N, D, V): a batch of AWD-LSTM on Penn Treebank and on WikiText-2.
SHAPES = [(1400, 400, 10_000), (1400, 400, 33_278)]


def trees(
    classes: int, frequencies: np.ndarray[Any, Any], n_trees: int
) -> tuple[dict[str, Tensor], int]:
    tables, max_depth, _ = stack_tables(build_ensemble("huffman", classes, n_trees, frequencies))
    return tables, max_depth


@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestPath:
    @pytest.mark.parametrize(("n_trees", "subset"), [(1, 1.0), (8, 0.5)], ids=["T1", "T8"])
    def test_hstree(
        self, benchmark: Any, shape: tuple[int, int, int], n_trees: int, subset: float
    ) -> None:
        _, features, classes = shape
        benchmark.group = f"path {shape}"
        input, target, frequencies = batch(*shape)
        tables, max_depth = trees(classes, frequencies, n_trees)
        size = int(features * subset)
        index = None
        if size < features:
            index = torch.stack(
                [torch.randperm(features)[:size].sort().values for _ in range(n_trees)]
            ).int()
        weight = torch.randn(n_trees, classes - 1, size).mul_(0.05).requires_grad_()
        bias = torch.zeros(n_trees, classes - 1, requires_grad=True)

        def loss() -> Tensor:
            log_prob = path_log_prob(
                input,
                weight,
                bias,
                target,
                tables["path_offset"],
                tables["path"],
                tables["leaf_position"],
                index,
                max_depth=max_depth,
                sparse=True,
            )
            return -torch.logsumexp(log_prob, 1).mean()

        benchmark.pedantic(step(loss, [input, weight, bias]), rounds=50, warmup_rounds=5)

    def test_torch_tree(self, benchmark: Any, shape: tuple[int, int, int]) -> None:
        _, features, classes = shape
        benchmark.group = f"path {shape}"
        input, target, frequencies = batch(*shape)
        tables, _ = trees(classes, frequencies, 1)
        weight = torch.randn(classes - 1, features).mul_(0.05).requires_grad_()
        bias = torch.zeros(classes - 1, 1, requires_grad=True)

        def loss() -> Tensor:
            return torch_tree_loss(
                input, weight, bias, target, tables["path_offset"][0], tables["path"]
            )

        benchmark.pedantic(step(loss, [input, weight, bias]), rounds=20, warmup_rounds=2)

    def test_torch_flat(self, benchmark: Any, shape: tuple[int, int, int]) -> None:
        _, features, classes = shape
        benchmark.group = f"path {shape}"
        input, target, _ = batch(*shape)
        weight = torch.randn(classes, features).mul_(0.05).requires_grad_()
        bias = torch.zeros(classes, requires_grad=True)
        benchmark.pedantic(
            step(lambda: flat_loss(input, weight, bias, target), [input, weight, bias]),
            rounds=3,
            warmup_rounds=1,
        )


def test_baseline_is_the_same_tree() -> None:
    """The vectorised torch tree that hstree is measured against computes the same loss and
    gradients."""
    input, target, frequencies = batch(30, 16, 50)
    tables, max_depth = trees(50, frequencies, 1)
    weight, bias = torch.randn(49, 16, requires_grad=True), torch.randn(49, 1, requires_grad=True)
    baseline = torch_tree_loss(
        input, weight, bias, target, tables["path_offset"][0], tables["path"]
    )
    ours = -path_log_prob(
        input,
        weight[None],
        bias.T,
        target,
        tables["path_offset"],
        tables["path"],
        tables["leaf_position"],
        max_depth=max_depth,
    ).mean()
    torch.testing.assert_close(ours, baseline)
    expected = torch.autograd.grad(baseline, (input, weight, bias))
    for got, want in zip(torch.autograd.grad(ours, (input, weight, bias)), expected, strict=True):
        torch.testing.assert_close(got, want.to_dense() if want.is_sparse else want)
