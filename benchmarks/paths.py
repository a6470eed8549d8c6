"""Steps of the path kernel and of its baselines, by contest and name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import bag_dot, gathered_dot, torch_tree_log_softmax
from benchmarks.contest import Build, Contestant, Size, batch, step
from benchmarks.heads import FLAT, FLAT_LOSSES
from hstree.heads.trees import Paths as Tables
from hstree.ops import path_log_prob
from hstree.trees import build_ensemble

# Batches of AWD-LSTM on Penn Treebank and WikiText-2; the vocabulary of WikiText-103.
PATH_SIZES = [
    Size(1400, 400, 10_000, 400),
    Size(1400, 400, 33_278, 400),
    Size(2048, 512, 267_735, 512),
]
WIKITEXT = PATH_SIZES[1]
CLASSES = [1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]
GROWTH = Size(1400, 400, CLASSES[-1], 400)

Dot = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Paths:
    """A batch and T binary Huffman trees over half of the features each, or one tree over all."""

    input: Tensor  # [N, D]
    weight: Tensor  # [T, M, S]
    bias: Tensor  # [T, M]
    target: Tensor  # [N]
    path_offset: Tensor  # [T, V + 1]
    path: Tensor  # [P]
    leaf_position: Tensor  # [T, V]
    feature_index: Tensor | None  # [T, S]
    max_depth: int

    @property
    def visits(self) -> int:
        """Number of nodes on the paths of all rows in all trees."""
        offset = self.path_offset
        return int((offset[:, self.target + 1] - offset[:, self.target]).sum())

    def log_prob(self, sparse: bool = True) -> Tensor:
        """[N, T] by hstree."""
        leaves = self.input, self.weight, self.bias, self.target
        tables = self.path_offset, self.path, self.leaf_position, self.feature_index
        return path_log_prob(*leaves, *tables, max_depth=self.max_depth, sparse=sparse)

    def torch_log_prob(self, leaves: Sequence[Tensor], dot: Dot) -> Tensor:
        """The same by torch's own ops: input, weight [T M, S] and bias [T M, 1]."""
        tables = (self.target, self.path_offset, self.path, self.feature_index)
        return torch_tree_log_softmax(*leaves, *tables, dot=dot)

    def flat_leaves(self, dtype: torch.dtype) -> list[Tensor]:
        """Input, weight and bias as torch's trees take them, in a dtype."""
        leaves = (self.input, self.weight.flatten(0, 1), self.bias.view(-1, 1))
        return [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]

    def results(self) -> list[Tensor]:
        """log_prob and the gradients of the mean loss; those of the weights only in visited
        rows."""
        return _results(self.log_prob(), [self.input, self.weight, self.bias])

    def torch_results(self, dtype: torch.dtype, dot: Dot = gathered_dot) -> list[Tensor]:
        """The same by torch's own ops for the same values, in a dtype."""
        leaves = self.flat_leaves(dtype)
        return _results(self.torch_log_prob(leaves, dot), leaves)


@lru_cache(maxsize=2)
def draw_paths(
    size: Size,
    n_trees: int,
    dtype: torch.dtype = torch.float32,
    *,
    part: int | None = None,
    recipe: str = "huffman",
    device: str = "cpu",
) -> Paths:
    """Trees over one of ``part`` parts of the features each, by default 2 if there are several.

    Cached for both numbers of trees, so that steps share their batch, until ``cache_clear()``.
    """
    input, target, frequencies = batch(size.rows, size.features, size.classes, device)
    options = {"frequencies": frequencies} if recipe == "huffman" else {}
    trees = build_ensemble(recipe, size.classes, n_trees, **options)
    tables = Tables(trees, None, 1, sparse=True)
    subset, index = size.features // (part or min(n_trees, 2)), None
    if subset < size.features:
        drawn = [torch.randperm(size.features)[:subset].sort().values for _ in trees]
        index = torch.stack(drawn).int().to(device)
    # The vectors repeat: drawing others for millions of nodes takes long.
    some = torch.empty(1009, subset, device=device).uniform_(-0.1, 0.1).to(dtype)
    nodes = size.classes - 1
    row = torch.arange(n_trees * nodes, device=device) % len(some)
    weight = some[row].view(n_trees, nodes, subset)
    return Paths(
        input.detach().to(dtype).requires_grad_(),
        weight.requires_grad_(),
        torch.zeros(n_trees, nodes, dtype=dtype, device=device, requires_grad=True),
        target,
        tables.path_offset.to(device),
        tables.path.to(device),
        tables.leaf_position.to(device),
        index,
        tables.max_depth,
    )


def _results(log_prob: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    results = [log_prob.detach(), *torch.autograd.grad(mean_loss(log_prob), leaves)]
    dense = (r.coalesce().values() if r.is_sparse else r for r in results)
    return [r.double().view(len(r), -1) for r in dense]


def mean_loss(log_prob: Tensor) -> Tensor:
    """Loss of a mixture with equal weights, up to a constant: log_prob [N, T]."""
    return -torch.logsumexp(log_prob, 1).mean()


def _hstree(
    size: Size,
    device: str,
    n_trees: int,
    *,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
    classes: int | None = None,
) -> Contestant:
    """``classes``: V, if it is below that of the size."""
    if classes is not None:
        size = replace(size, classes=min(classes, size.classes))
    paths = draw_paths(size, n_trees, dtype)
    leaves = [paths.input, paths.weight, paths.bias]
    return Contestant(
        step(lambda: mean_loss(paths.log_prob()), leaves),
        parameters=paths.weight.numel() + paths.bias.numel(),
        threads=threads,
        visits=paths.visits,
    )


def _torch_tree(size: Size, device: str, n_trees: int, dot: Dot) -> Contestant:
    paths = draw_paths(size, n_trees)
    leaves = paths.flat_leaves(torch.float32)
    return Contestant(
        step(lambda: mean_loss(paths.torch_log_prob(leaves, dot)), leaves),
        parameters=sum(leaf.numel() for leaf in leaves[1:]),
        visits=paths.visits,
    )


def _by_trees(title: str, build: Callable[..., Contestant], **options: Any) -> dict[str, Build]:
    return {f"{title}, T = {t}": partial(build, n_trees=t, **options) for t in (1, 8)}


PATH: dict[str, Build] = {
    **_by_trees("hstree", _hstree),
    **_by_trees("torch tree, bags", _torch_tree, dot=bag_dot),
    **_by_trees("torch tree", _torch_tree, dot=gathered_dot),
    FLAT: FLAT_LOSSES[FLAT],
}

PATH_CONTESTS: dict[str, dict[str, Build]] = {
    **{f"path, V = {size.classes}": PATH for size in PATH_SIZES},
    "threads": {
        f"T = {t}, threads = {n}": partial(_hstree, n_trees=t, threads=n)
        for t in (1, 8)
        for n in (1, 2)
    },
    "precision": {
        f"T = {t}, {str(dtype).removeprefix('torch.')}": partial(_hstree, n_trees=t, dtype=dtype)
        for t in (1, 8)
        for dtype in (torch.float32, torch.bfloat16)
    },
    **{
        f"growth, T = {t}": {f"V = {v}": partial(_hstree, n_trees=t, classes=v) for v in CLASSES}
        for t in (1, 8)
    },
}
