"""Mixtures of trees for the ops that walk them from the root."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.trees import Tree, build_ensemble
from hstree.trees.ensemble_tables import ensemble_tables
from hstree.trees.tables import table_sizes
from ops.apart import corrupt


@dataclass(frozen=True)
class Mixture:
    """The arguments that the ops share, in their order, and the trees."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    class_weight: Tensor | None
    class_bias: Tensor | None
    root_log_prob: Tensor | None
    log_gate: Tensor
    feature_index: Tensor | None
    node: Tensor
    edge: Tensor
    leaf_edge: Tensor
    trees: tuple[Tree, ...]

    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in list(self.__dataclass_fields__)[:-1])

    def on(self, device: torch.device) -> Mixture:
        tensors = {
            name: value.to(device)
            for name in list(self.__dataclass_fields__)[:-1]
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **tensors)

    def to(self, dtype: torch.dtype) -> Mixture:
        """Sums of 16-bit elements are in float32."""
        sums = torch.promote_types(dtype, torch.float32)
        fields = {
            name: value.to(sums if name in ("root_log_prob", "log_gate") else dtype)
            for name in list(self.__dataclass_fields__)[:-1]
            if (value := getattr(self, name)) is not None and value.is_floating_point()
        }
        return replace(self, **fields)


def draw(
    trees: list[Tree],
    rows: int = 6,
    features: int = 19,
    subset: int | None = None,
    bias: bool = True,
    scale: float = 0.5,
    seed: int = 0,
    groups: bool = False,
) -> Mixture:
    """In float64, of values that every dtype holds; groups: whether the trees have two levels."""
    random = np.random.default_rng(seed)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.from_numpy(random.standard_normal(shape) * scale)
        return drawn.to(torch.bfloat16).to(torch.float16).double()

    sizes = [table_sizes((t.order, t.node_offset, t.boundary), groups) for t in trees]
    tables = ensemble_tables(trees, sizes, groups)
    node, edge, leaf_edge = (torch.from_numpy(tables[n]) for n in ("node", "edge", "leaf_edge"))
    binary, width = max(of_tree.n_binary for of_tree in sizes), sizes[0].root_width
    classes = trees[0].n_classes if groups else 0
    index, size = None, features
    if subset is not None:
        size = subset
        chosen = [np.sort(random.permutation(features)[:subset]) for _ in trees]
        index = torch.from_numpy(np.stack(chosen)).int()
    return Mixture(
        values(rows, features),
        values(len(trees), binary, size, scale=scale) if binary else None,
        values(len(trees), binary) if binary and bias else None,
        values(classes, features, scale=scale) if classes else None,
        values(len(trees), classes) if classes and bias else None,
        values(len(trees), rows, width).log_softmax(2) if width else None,
        values(rows, len(trees)).log_softmax(1),
        index,
        node,
        edge,
        leaf_edge,
        tuple(trees),
    )


def walked(mixture: Mixture, row: int) -> list[float]:
    """Log-probability of each class, from the trees as nested tuples, number by number."""
    terms = []
    for t, tree in enumerate(mixture.trees):
        x = hidden = mixture.hidden[row]
        if mixture.feature_index is not None:
            x = x[mixture.feature_index[t].long()]
        numbers, log_prob = itertools.count(), [0.0] * tree.n_classes

        def score(n: int, t: int = t, x: Tensor = x) -> float:
            z = sum(float(a) * float(b) for a, b in zip(x, mixture.weight[t, n], strict=True))
            return z + (0.0 if mixture.bias is None else float(mixture.bias[t, n]))

        def walk(
            below: Any,
            value: float,
            root: bool,
            t: int = t,
            hidden: Tensor = hidden,
            numbers: Iterator[int] = numbers,
            log_prob: list[float] = log_prob,
        ) -> None:
            if isinstance(below, int):
                log_prob[below] = value
                return
            if root and mixture.root_log_prob is not None:
                steps = mixture.root_log_prob[t, row].tolist()
            elif mixture.class_weight is not None:
                z = mixture.class_weight[list(below)] @ hidden
                z += 0 if mixture.class_bias is None else mixture.class_bias[t, list(below)]
                steps = z.log_softmax(0).tolist()
            else:
                one = score(next(numbers))
                steps = [-math.log1p(math.exp(-one)), -math.log1p(math.exp(one))]
            for child, step in zip(below, steps, strict=True):
                walk(child, value + step, False)

        walk(tree.to_nested(), 0.0, True)
        terms.append([float(mixture.log_gate[row, t]) + value for value in log_prob])
    return [math.log(sum(math.exp(term) for term in of)) for of in zip(*terms, strict=True)]


def huffman(
    classes: int, trees: int = 1, root: int = 2, binary: bool = True, order: float = 1.0
) -> list[Tree]:
    frequencies = np.arange(1, classes + 1) ** -order
    return build_ensemble("huffman", classes, trees, frequencies, None, 0, root, binary)


def two_levels(classes: int, n_trees: int, root: int) -> list[Tree]:
    """Random groups, some of a single class."""
    random = np.random.default_rng(classes)
    trees = []
    for _ in range(n_trees):
        cuts = np.sort(random.choice(np.arange(1, classes), root - 1, replace=False))
        parts = [part.tolist() for part in np.split(random.permutation(classes), cuts)]
        trees.append(Tree.from_nested(tuple(p[0] if len(p) == 1 else tuple(p) for p in parts)))
    return trees


MIXTURES = {
    "one binary tree": lambda: draw(huffman(23)),
    "binary trees over subsets": lambda: draw(huffman(37, 3), features=40, subset=17),
    "wide root": lambda: draw(huffman(50, 2, root=8), subset=7),
    "groups": lambda: draw(two_levels(60, 3, 9), subset=9, groups=True, rows=3),
    "groups of many sizes": lambda: draw(two_levels(200, 4, 30), groups=True),
    "two clusters": lambda: draw(two_levels(20, 2, 2), groups=True, bias=False),
    "one node": lambda: draw(huffman(30, 2, root=30)),
    "two classes": lambda: draw(huffman(2, 2)),
    "one class": lambda: draw(huffman(1, 2)),
    "deepest tree": lambda: draw(huffman(61, 2, order=30.0), scale=0.1),
    "flat": lambda: draw(huffman(64, 2), scale=0.0, bias=False),
    "peaked": lambda: draw(huffman(64, 3), scale=2.0),
    "no features": lambda: draw(huffman(16, 2), features=0),
    "no rows": lambda: draw(huffman(16, 2), rows=0),
}
every_mixture = pytest.mark.parametrize("name", MIXTURES)


def wide_groups() -> Mixture:
    """Groups of more classes than a block holds scores, and of fewer."""
    groups = (tuple(range(1200)), tuple(range(1200, 1205)), 1205)
    first, second = Tree.from_nested(groups), Tree.from_nested((1205, *groups[:2]))
    return draw([first, second], rows=2, features=6, scale=1.0, groups=True)


# Of features and of groups on CUDA.
BLOCKS = {
    "features of several accesses": lambda: draw(huffman(30, 2, root=5), features=301),
    "aligned rows": lambda: draw(huffman(30, 2, root=5), features=528),
    "aligned rows of subsets": lambda: draw(
        two_levels(60, 3, 9), features=48, subset=16, groups=True
    ),
    "no features, groups": lambda: draw(two_levels(16, 2, 5), features=0, groups=True),
    "wide groups": wide_groups,
}


def corrupted(seed: int, random: np.random.Generator) -> Mixture | None:
    """A mixture with wrong numbers in one of its tables; None where that table is missing."""
    names = [name for name in MIXTURES if name not in ("no rows", "no features")]
    mixture = MIXTURES[names[seed % len(names)]]()
    table = ("node", "edge", "leaf_edge", "feature_index")[random.integers(4)]
    if getattr(mixture, table) is None:
        return None
    return replace(mixture, **{table: corrupt(getattr(mixture, table), random)})
