"""Batches over small random trees for the ops that mix the probabilities of all classes: binary
trees, with wide roots or without, and trees of two levels, with groups of classes. Tables are built
here from nested tuples, apart from hstree.trees."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from reference.tree_log_softmax import tree_log_softmax_reference
from torch import Tensor

from hstree.ops import tree_log_softmax
from hstree.ops._composed_tree_log_softmax import class_rows, composed_log_prob, with_class_rows
from ops.apart import corrupt
from ops.cases import random_nested

SUMS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    why: str
    shapes: tuple[str, ...] = ("random", "random", "random")  # below roots; flat: a root alone
    classes: int = 23
    root: int = 0  # children of a wide root
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
    root_begin: int
    grad: Tensor
    nested: list[Any]
    class_score: Tensor | None = None  # with groups
    class_bias: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arguments that have a gradient."""
        own = ("score", "log_gate")
        return own if self.class_score is None else (*own, "class_score", "class_bias")

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def arguments(self) -> tuple[Any, ...]:
        """Those of the operator."""
        trees = self.score, self.log_gate, self.node, self.edge, self.root_begin, self.classes
        return *trees, self.class_score, self.class_bias

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
        if self.class_score is not None:
            some["class_score"] = self.class_score[rows]
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
        root_begin=batch.root_begin,
        class_score=batch.class_score,
        class_bias=batch.class_bias,
    )


def composed(batch: Batch) -> Tensor:
    """As where there is no kernel."""
    score, begin, end = batch.score, batch.root_begin, batch.root_begin
    if batch.class_score is not None:
        of_rows = class_rows(batch.node, batch.edge, batch.classes)
        score = with_class_rows(score, batch.class_score, batch.class_bias, of_rows, begin)
        end += batch.classes
    tables = batch.node, batch.edge, batch.classes
    return composed_log_prob(score, batch.log_gate, *tables, begin, end)


def reference(batch: Batch) -> Tensor:
    tables = batch.node, batch.edge, batch.classes, batch.root_begin
    of_classes = batch.class_score, batch.class_bias
    return tree_log_softmax_reference(batch.score, batch.log_gate, *tables, *of_classes)


def walked(batch: Batch) -> Tensor:
    """The log-probabilities by definition: each tree from its root, nested tuples at hand."""
    trees = []
    for t, nested in enumerate(batch.nested):
        found: dict[int, Tensor] = {}
        rows = iter(batch.score[t, : batch.root_begin])

        def visit(
            item: Any, above: Tensor, is_root: bool, t: int, rows: Any, found: dict[int, Tensor]
        ) -> None:
            if not isinstance(item, tuple):
                found[item] = above
                return
            children: Any
            if is_root and (len(item) > 2 or batch.class_score is not None):
                z = batch.score[t, batch.root_begin : batch.root_begin + len(item)]
                children = z.log_softmax(0)
            elif batch.class_score is not None:
                z = batch.class_score[:, list(item)] + batch.class_bias[t, list(item)]
                children = z.log_softmax(1).unbind(1)
            else:
                z = next(rows)
                children = F.logsigmoid(torch.stack([z, -z]))
            for child, log_prob in zip(item, children, strict=True):
                visit(child, above + log_prob, False, t, rows, found)

        visit(nested, batch.log_gate[:, t], True, t, rows, found)
        trees.append(torch.stack([found[y] for y in range(batch.classes)], 1))
    return torch.logsumexp(torch.stack(trees), 0)


def tables_of(nested: Any, groups: bool = False) -> tuple[list[Any], list[Any], tuple[int, int]]:
    """Nodes and edges of a tree, and its numbers of binary nodes and of children of a wide root."""
    nodes: list[Any] = []
    edges: list[Any] = []
    binary, leaves, root = itertools.count(), itertools.count(), 0

    def visit(item: Any, above: int) -> int:
        nonlocal root
        index, first, width = len(nodes), len(edges), len(item)
        if index == 0 and (groups or width > 2):
            block, row, root = 2, 0, width
        elif groups:
            places = [next(leaves) for _ in item]
            block, row = 1, places[0]
        else:
            assert width == 2
            block, row = 0, next(binary)
        nodes.append((block, row, first, width, above))
        edges.extend((index, None) for _ in item)
        for e, child in enumerate(item, first):
            if not isinstance(child, tuple) and block != 1:
                next(leaves)
            edges[e] = (index, visit(child, e) if isinstance(child, tuple) else ~child)
        return index

    if isinstance(nested, tuple):
        visit(nested, -1)
    return nodes, edges, (next(binary), root)


def draw_tree(case: Case, shape: str, random: np.random.Generator, groups: bool) -> Any:
    order = random.permutation(case.classes).tolist()
    if shape == "flat" or (groups and case.classes < 3):
        return tuple(order) if len(order) > 1 else order[0]
    if groups:  # classes below the root, and groups of 2 to 40
        tree, begin = [], 0
        while begin < case.classes:
            width = int(min(random.choice([1, 2, 3, 15, 16, 17, 40]), case.classes - begin))
            tree.append(tuple(order[begin : begin + width]) if width > 1 else order[begin])
            begin += width
        return tuple(tree) if len(tree) > 1 else tree[0]
    if case.root < 3:
        return random_nested(case.classes, 2, shape, random)
    cuts = np.sort(random.choice(np.arange(1, case.classes), case.root - 1, replace=False))
    parts = np.split(np.array(order), cuts)

    def named(item: Any, names: list[int]) -> Any:
        return tuple(named(x, names) for x in item) if isinstance(item, tuple) else names[item]

    return tuple(named(random_nested(len(part), 2, shape, random), part.tolist()) for part in parts)


def draw(
    case: Case,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    groups: bool = False,
    nested: Sequence[Any] = (),
) -> Batch:
    """``nested``: the trees, in place of random ones."""
    random = np.random.default_rng(seed)
    nested = list(nested) or [draw_tree(case, shape, random, groups) for shape in case.shapes]
    tables = [tables_of(tree, groups) for tree in nested]
    binary, root = (max(used[i] for *_, used in tables) for i in range(2))
    trees = len(nested)
    node, edge = (
        np.zeros((trees, max(len(table[i]) for table in tables), columns), np.int32)
        for i, columns in ((0, 5), (1, 2))
    )
    for t, (nodes, edges, _) in enumerate(tables):
        node[t, : len(nodes)] = np.reshape(nodes, (-1, 5))
        edge[t, : len(edges)] = np.reshape(edges, (-1, 2))

    def values(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape)).float().to(dtype)

    return Batch(
        class_score=case.scale * values(case.rows, case.classes) if groups else None,
        class_bias=values(trees, case.classes) if groups else None,
        score=case.scale * values(trees, binary + root, case.rows),
        log_gate=values(case.rows, trees).log_softmax(1),
        node=torch.from_numpy(node),
        edge=torch.from_numpy(edge),
        classes=case.classes,
        root_begin=binary,
        grad=values(case.rows, case.classes),
        nested=nested,
    )


def by_hand(nodes: list[Any], edges: list[Any], sizes: tuple[int, int], classes: int) -> Batch:
    """A tree with scores of zero, without groups; sizes: binary nodes, and children of the root."""
    return Batch(
        torch.zeros(1, sum(sizes), 3),
        torch.zeros(3, 1),
        torch.tensor([nodes], dtype=torch.int32),
        torch.tensor([edges], dtype=torch.int32),
        classes,
        sizes[0],
        torch.zeros(3, classes),
        [],
    )


def corrupted(seed: int, groups: bool) -> Batch:
    """A batch with random numbers in a table."""
    random = np.random.default_rng(seed)
    shapes = tuple(random.choice(["random", "chain", "flat"], 2))
    rows, classes = (int(random.integers(1, most)) for most in (20, 60))
    root = int(random.choice([0, min(5, classes)]))
    case = Case("corrupt", shapes, classes, root, rows=rows)
    batch = draw(case, torch.float32, seed, groups)
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
