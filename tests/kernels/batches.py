"""Batches over small random trees: the tables and the exact values of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernels.emulation import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Array, ElementType, Tables


@dataclass(frozen=True)
class Case:
    """A batch. `widest` children at most for each node; 0 for the op on binary nodes. `leaves`: for
    the leaf op, whose trees are groups of classes, or, if nested, wide trees over half of them."""

    why: str
    rows: int = 41
    trees: int = 2
    classes: int = 23
    in_features: int = 16
    features: int | None = None  # of a subset; None: no feature_index
    block: int = 1  # of features of which the subset is made
    shape: str = "random"  # of the tree: random, chain, balanced, flat, nested
    widest: int = 0
    leaves: bool = False
    scale: float = 1.0
    ignored: float = 0.15  # share of the rows
    favourite: float = 0.0  # share of the rows that have class 0
    bias: bool = True
    kinds: tuple[ElementType, ...] = field(default=(FLOAT32, FLOAT64, BFLOAT16, FLOAT16))

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


@dataclass
class Batch:
    """Tables and exact values of the tensors of a case; `paths` by tree and class."""

    tables: Tables
    hidden: Array
    weight: Array
    bias: Array | None
    grad_log_prob: Array
    paths: list[list[list[tuple[int, int, int]]]]  # (first row, width, child); binary: width 1

    def subset(self, tree: int) -> Array:
        index = self.tables.feature_index
        return np.arange(self.tables.in_features) if index is None else index[tree]

    def weight_rows(self, tree: int, first: int, width: int) -> tuple[Any, ...]:
        """Index of the rows of a node in weight."""
        tree_index, rows = self.bias_rows(tree, first, width)
        return (tree_index, rows) if self.tables.leaf_class is None else (rows,)

    def bias_rows(self, tree: int, first: int, width: int) -> tuple[Any, ...]:
        rows = slice(first, first + width)
        leaf_class = self.tables.leaf_class
        return tree, rows if leaf_class is None else leaf_class[tree, rows]

    def targets(self) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
        for row, target in enumerate(self.tables.target):
            for tree in range(self.tables.trees):
                if target >= 0 and self.paths[tree][target]:
                    yield row, tree, self.paths[tree][target]


def random_tree(
    case: Case, random: np.random.Generator
) -> tuple[Array, list[list[tuple[int, int, int]]], int]:
    """Leaf positions, paths by class, and weight rows; nodes are numbered in preorder."""
    order = random.permutation(case.classes)
    if case.favourite:  # class 0 in the middle, so that runs start before and go on after it
        order = np.roll(order, case.classes // 2 - int(np.flatnonzero(order == 0)[0]))
    paths: list[list[tuple[int, int, int]]] = [[] for _ in range(case.classes)]
    weight_rows = 0
    stack: list[tuple[int, int, list[tuple[int, int, int]]]] = [(0, case.classes, [])]
    while stack:
        begin, end, above = stack.pop()
        size = end - begin
        if size == 1:
            paths[order[begin]] = above
            continue
        if case.shape == "chain":
            cuts = [begin + 1]
        elif case.shape == "balanced":
            cuts = [begin + size // 2]
        elif case.shape == "flat":
            cuts = list(range(begin + 1, end))
        else:
            width = 2 if case.widest == 0 else int(random.integers(2, min(size, case.widest) + 1))
            cuts = sorted(
                int(c) for c in random.choice(np.arange(begin + 1, end), width - 1, replace=False)
            )
        bounds = [begin, *cuts, end]
        width = len(bounds) - 1
        first = weight_rows
        weight_rows += width if case.widest else 1
        for child in reversed(range(width)):
            entry = (first, width, child) if case.widest else (first, 1, 1 - child)
            stack.append((bounds[child], bounds[child + 1], [*above, entry]))
    position = np.empty(case.classes, np.int32)
    position[order] = np.arange(case.classes)
    return position, paths, weight_rows


def random_groups(
    case: Case, random: np.random.Generator
) -> tuple[Array, list[list[tuple[int, int, int]]], Array]:
    """Leaf positions, paths by class, and the classes of the rows of a tree of the leaf op."""
    if case.shape == "nested":
        half = replace(case, classes=case.classes // 2, shape="random")
        position, paths, _ = random_tree(half, random)
        rest = np.arange(len(position), case.classes, dtype=np.int32)
        paths += [[] for _ in rest]
        return np.append(position, rest), paths, random.permutation(case.classes)
    order = random.permutation(case.classes)
    paths = [[] for _ in range(case.classes)]
    begin = 0
    while begin < case.classes:
        width = case.classes if case.shape == "flat" else int(random.integers(1, case.widest + 1))
        members = order[begin : begin + width]
        for child, member in enumerate(members):
            paths[member] = [(begin, len(members), child)] if len(members) > 1 else []
        begin += width
    return np.argsort(order).astype(np.int32), paths, order


def make_batch(case: Case, kind: ElementType, seed: int = 0) -> Batch:
    random = np.random.default_rng(seed)
    leaf_class = None
    if case.leaves:
        grouped = [random_groups(case, random) for _ in range(case.trees)]
        leaf_class = np.stack([classes for _, _, classes in grouped]).astype(np.int32)
        trees = [(position, paths, case.classes) for position, paths, _ in grouped]
    else:
        trees = [random_tree(case, random) for _ in range(case.trees)]
    weight_rows = max(rows for _, _, rows in trees)
    paths = [paths for _, paths, _ in trees]
    lengths = np.array([[len(path) for path in tree] for tree in paths])
    offset = np.zeros((case.trees, case.classes + 1), np.int64)
    flat = np.cumsum(lengths.reshape(-1)).reshape(lengths.shape)
    offset[:, 1:] = flat
    offset[1:, 0] = flat[:-1, -1]
    entries = [entry for tree in paths for path in tree for entry in path]
    if case.widest:
        path = np.array(entries, np.int32).reshape(-1, 3)
        stride = max(sum(width for _, width, _ in path) for tree in paths for path in tree)
    else:
        path = np.array([node << 1 | left for node, _, left in entries], np.int32)
        stride = int(lengths.max())
    feature_index = None
    if case.features is not None:
        blocks, taken = case.in_features // case.block, case.features // case.block
        first = case.block * np.stack(
            [np.sort(random.choice(blocks, taken, replace=False)) for _ in range(case.trees)]
        )
        feature_index = (first[:, :, None] + np.arange(case.block)).reshape(case.trees, -1)
        feature_index = feature_index.astype(np.int32)
    target = random.integers(0, case.classes, case.rows)
    target[random.random(case.rows) < case.favourite] = 0
    target[random.random(case.rows) < case.ignored] = -1
    tables = Tables(
        target=target,
        offset=offset,
        path=path,
        leaf_position=np.stack([position for position, _, _ in trees]),
        feature_index=feature_index,
        weight_rows=weight_rows,
        in_features=case.in_features,
        stride=stride,
        leaf_class=leaf_class,
    )

    def exact(values: Array) -> Array:
        return kind.decode(kind.encode(values))

    shape = (case.trees, weight_rows)
    scale = case.scale
    return Batch(
        tables=tables,
        hidden=exact(scale * random.standard_normal((case.rows, case.in_features))),
        weight=exact(scale * random.standard_normal((*shape[case.leaves :], tables.features))),
        bias=exact(scale * random.standard_normal(shape)) if case.bias else None,
        # Upstream gradients of either sign, over three orders of magnitude.
        grad_log_prob=(
            random.standard_normal((case.rows, case.trees))
            * 10.0 ** random.uniform(-2, 1, (case.rows, case.trees))
        ).astype(kind.sums),
        paths=paths,
    )
