"""Batches over small random trees for the ops that mix the probabilities of all classes, with leaf
groups and without. Tables are built here from nested tuples, apart from hstree.heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from reference.tree_log_softmax import tree_log_softmax_reference
from torch import Tensor

from hstree.ops import tree_log_softmax
from hstree.ops._composed_tree_log_softmax import composed_log_prob, leaf_classes, with_leaf_rows
from ops.apart import corrupt
from ops.cases import random_nested

SUMS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    why: str
    shapes: tuple[str, ...] = ("random", "random", "random")  # of the trees, or levels: groups
    classes: int = 23
    widest: int = 6
    rows: int = 17  # a vector of float32 and one more
    scale: float = 1.0

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


@dataclass
class Batch:
    score: Tensor
    log_gate: Tensor
    node: Tensor
    edge: Tensor
    classes: int
    wide_begin: int
    root_begin: int
    grad: Tensor
    nested: list[Any]
    leaf_score: Tensor | None = None  # with leaf groups
    leaf_bias: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arguments that have a gradient."""
        own = ("score", "log_gate")
        return own if self.leaf_score is None else ("leaf_score", "leaf_bias", *own)

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def arguments(self) -> tuple[Any, ...]:
        """Those of the operator."""
        tables = self.node, self.edge, self.wide_begin, self.root_begin, self.classes
        return *self.leaves, *tables

    def with_leaves(self, leaves: tuple[Tensor, ...]) -> Batch:
        return replace(self, **dict(zip(self.names, leaves, strict=True)))

    def to(self, target: torch.dtype | torch.device | str) -> Batch:
        """A dtype is that of the floating-point tensors."""
        changes = {
            name: x.to(target)
            for name, x in vars(self).items()
            if isinstance(x, Tensor)
            and (x.is_floating_point() or not isinstance(target, torch.dtype))
        }
        return replace(self, **changes)

    def rows(self, rows: slice) -> Batch:
        some = {"score": self.score[..., rows], "log_gate": self.log_gate[rows]}
        if self.leaf_score is not None:
            some["leaf_score"] = self.leaf_score[rows]
        return replace(self, grad=self.grad[rows], **some)

    def transposed(self) -> Batch:
        """The same tensors, not contiguous."""
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        other = {n: x.transpose(0, -1).contiguous().transpose(0, -1) for n, x in tensors.items()}
        assert not any(x.is_contiguous() for x in other.values())
        return replace(self, **other)

    def gradients(self, function: Callable[[Batch], Tensor]) -> list[Tensor]:
        """log_prob, and the gradients of the leaves."""
        leaves = tuple(x.detach().clone().requires_grad_() for x in self.leaves)
        log_prob = function(self.with_leaves(leaves))
        log_prob.backward(self.grad)
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
        return [log_prob.detach(), *grads]


def mixed(batch: Batch) -> Tensor:
    return tree_log_softmax(
        batch.score,
        batch.log_gate,
        batch.node,
        batch.edge,
        batch.classes,
        wide_begin=batch.wide_begin,
        root_begin=batch.root_begin,
        leaf_score=batch.leaf_score,
        leaf_bias=batch.leaf_bias,
    )


def composed(batch: Batch) -> Tensor:
    """As where there is no kernel."""
    score, log_gate, node, edge, wide_begin, root_begin, classes = batch.arguments()[-7:]
    if batch.leaf_score is not None:
        of_rows = leaf_classes(node, edge, root_begin - wide_begin, classes)
        score = with_leaf_rows(score, batch.leaf_score, batch.leaf_bias, of_rows, root_begin)
        root_begin += classes
    return composed_log_prob(score, log_gate, node, edge, classes, wide_begin, root_begin)


def reference(batch: Batch) -> Tensor:
    tables = batch.node, batch.edge, batch.classes, batch.wide_begin, batch.root_begin
    leaves = batch.leaf_score, batch.leaf_bias
    return tree_log_softmax_reference(batch.score, batch.log_gate, *tables, *leaves)


def is_group(item: tuple[Any, ...], is_root: bool) -> bool:
    return not (is_root and len(item) > 2) and not any(isinstance(x, tuple) for x in item)


def tables_of(nested: Any, groups: bool = False) -> tuple[list[Any], list[Any], list[int]]:
    """Nodes and edges of a tree, and the rows of its three blocks and of its leaf groups, whose
    nodes have block 3."""
    nodes: list[Any] = []
    edges: list[Any] = []
    used = [0, 0, 0, 0]

    def visit(item: Any, above: int) -> int:
        index, first, width = len(nodes), len(edges), len(item)
        block = 0 if width == 2 else 1 if index else 2
        block = 3 if groups and is_group(item, index == 0) else block
        nodes.append((block, used[block], first, width, above))
        used[block] += 1 if block == 0 else width
        edges.extend((index, None) for _ in item)
        for e, child in enumerate(item, first):
            edges[e] = (index, visit(child, e) if isinstance(child, tuple) else ~child)
        return index

    if isinstance(nested, tuple):
        visit(nested, -1)
    return nodes, edges, used


def draw_tree(case: Case, shape: str, random: np.random.Generator) -> Any:
    if shape != "levels" or case.classes < 3:
        return random_nested(case.classes, case.widest, shape.replace("levels", "flat"), random)
    # Classes below the root, and groups of 2 to 40.
    order, tree, begin = random.permutation(case.classes).tolist(), [], 0
    while begin < case.classes:
        width = int(min(random.choice([1, 2, 3, 15, 16, 17, 40]), case.classes - begin))
        tree.append(tuple(order[begin : begin + width]) if width > 1 else order[begin])
        begin += width
    return tuple(tree) if len(tree) > 1 else tree[0]


def draw(
    case: Case,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    groups: bool = False,
    nested: Sequence[Any] = (),
) -> Batch:
    """``nested``: the trees, in place of random ones."""
    random = np.random.default_rng(seed)
    nested = list(nested) or [draw_tree(case, shape, random) for shape in case.shapes]
    tables = [tables_of(tree, groups) for tree in nested]
    sizes = [max(used[block] for *_, used in tables) for block in range(3)]
    trees = len(nested)
    node, edge = (
        np.zeros((trees, max(len(table[i]) for table in tables), columns), np.int32)
        for i, columns in ((0, 5), (1, 2))
    )
    for t, (nodes, edges, _) in enumerate(tables):
        node[t, : len(nodes)] = np.reshape(nodes, (-1, 5))
        edge[t, : len(edges)] = np.reshape(edges, (-1, 2))
    node[..., 1] += np.where(node[..., 0] == 3, sizes[1], 0)
    node[..., 0][node[..., 0] == 3] = 1

    def values(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape)).float().to(dtype)

    return Batch(
        leaf_score=case.scale * values(case.rows, case.classes) if groups else None,
        leaf_bias=values(trees, case.classes) if groups else None,
        score=case.scale * values(trees, sum(sizes), case.rows),
        log_gate=values(case.rows, trees).log_softmax(1),
        node=torch.from_numpy(node),
        edge=torch.from_numpy(edge),
        classes=case.classes,
        wide_begin=sizes[0],
        root_begin=sizes[0] + sizes[1],
        grad=values(case.rows, case.classes),
        nested=nested,
    )


def by_hand(nodes: list[Any], edges: list[Any], sizes: list[int], classes: int) -> Batch:
    """A tree with scores of zero, without leaf groups; sizes: rows of the three blocks."""
    return Batch(
        torch.zeros(1, sum(sizes), 3),
        torch.zeros(3, 1),
        torch.tensor([nodes], dtype=torch.int32),
        torch.tensor([edges], dtype=torch.int32),
        classes,
        sizes[0],
        sizes[0] + sizes[1],
        torch.zeros(3, classes),
        [],
    )


def corrupted(seed: int, groups: bool) -> Batch:
    """A batch with random numbers in a table."""
    random = np.random.default_rng(seed)
    shapes = tuple(random.choice(["random", "chain", "levels" if groups else "flat"], 2))
    rows, classes = (int(random.integers(1, most)) for most in (20, 60))
    batch = draw(Case("corrupt", shapes, classes, rows=rows), torch.float32, seed, groups)
    name = ("node", "edge")[random.integers(2)]
    return replace(batch, **{name: corrupt(getattr(batch, name), random)})


def check_against(
    batch: Batch, true: Callable[[Batch], Tensor], function: Any, device: torch.device
) -> None:
    """log_prob and its gradients: the error is at most three times that of the truth in the same
    precision, and a few roundings of values of the largest size, or of size one."""
    dtype, exact = batch.score.dtype, batch.to(torch.float64)
    values = batch.to(device).gradients(function), batch.gradients(true), exact.gradients(true)
    # Sums on a GPU have no fixed order.
    roundings = 4 if dtype == torch.float32 and device.type == "cpu" else 64
    for name, got, eager, wanted in zip(("log_prob", *batch.names), *values, strict=True):
        assert got.dtype == dtype, name
        assert got.shape == wanted.shape, name
        if got.numel():
            margin = roundings * torch.finfo(dtype).eps * max(1.0, wanted.abs().max().item())
            error, eager_error = (
                (x.cpu().double() - wanted).abs().max().item() for x in (got, eager)
            )
            assert error <= 3 * eager_error + margin, (
                f"{name}: {error:.3g}, eager {eager_error:.3g}"
            )
    if len(batch.grad):
        total = values[0][0].double().exp().sum(1)
        assert (total - 1).abs().max() < 300 * torch.finfo(dtype).eps
