"""Mixtures of trees for the ops that walk them from the root."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.heads.trees.layout import Layout
from hstree.trees import Tree, build_ensemble
from ops.apart import corrupt


@dataclass(frozen=True)
class Mixture:
    """Arguments of the op but for k, in its order, and the trees."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    wide_weight: Tensor | None
    wide_bias: Tensor | None
    leaf_weight: Tensor | None
    leaf_bias: Tensor | None
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
    leaves: bool = False,
) -> Mixture:
    """In float64, of values that every dtype holds."""
    random = np.random.default_rng(seed)

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.from_numpy(random.standard_normal(shape) * scale)
        return drawn.to(torch.bfloat16).to(torch.float16).double()

    layout = Layout(trees, leaf_groups=leaves)
    n_binary, n_wide, n_leaves, width = layout.n_rows
    index, size = None, features
    if subset is not None:
        size = subset
        chosen = [np.sort(random.permutation(features)[:subset]) for _ in trees]
        index = torch.from_numpy(np.stack(chosen)).int()
    return Mixture(
        values(rows, features),
        values(len(trees), n_binary, size, scale=scale) if n_binary else None,
        values(len(trees), n_binary) if n_binary and bias else None,
        values(len(trees), n_wide, size, scale=scale) if n_wide else None,
        values(len(trees), n_wide) if n_wide and bias else None,
        values(n_leaves, features, scale=scale) if n_leaves else None,
        values(len(trees), n_leaves) if n_leaves and bias else None,
        values(len(trees), rows, width).log_softmax(2) if width else None,
        values(rows, len(trees)).log_softmax(1),
        index,
        layout.node,
        layout.edge,
        layout.leaf_edge,
        tuple(trees),
    )


def walked(mixture: Mixture, row: int) -> list[float]:
    """Log-probability of each class, from the trees as nested tuples, number by number."""
    V = mixture.trees[0].n_classes
    terms = []
    for t, tree in enumerate(mixture.trees):
        x = hidden = mixture.hidden[row]
        if mixture.feature_index is not None:
            x = x[mixture.feature_index[t].long()]
        used = {"weight": 0, "wide_weight": 0}
        log_prob = [0.0] * V

        def score(name: str, t: int = t, x: Tensor = x, used: dict[str, int] = used) -> float:
            weight = getattr(mixture, name)[t, used[name]]
            bias = getattr(mixture, name.replace("weight", "bias"))
            z = sum(float(a) * float(b) for a, b in zip(x, weight, strict=True))
            z += 0.0 if bias is None else float(bias[t, used[name]])
            used[name] += 1
            return z

        def walk(
            below: Any,
            value: float,
            root: bool,
            t: int = t,
            hidden: Tensor = hidden,
            log_prob: list[float] = log_prob,
        ) -> None:
            if isinstance(below, int):
                log_prob[below] = value
                return
            is_wide_root = root and len(below) > 2
            if (
                mixture.leaf_weight is not None
                and not is_wide_root
                and set(map(type, below)) == {int}
            ):
                classes = list(below)
                z = mixture.leaf_weight[classes] @ hidden
                z += 0 if mixture.leaf_bias is None else mixture.leaf_bias[t, classes]
                steps = z.log_softmax(0).tolist()
            elif len(below) == 2:
                z = score("weight")
                steps = [-math.log1p(math.exp(-z)), -math.log1p(math.exp(z))]
            elif root:
                steps = mixture.root_log_prob[t, row].tolist()  # type: ignore[index]
            else:
                z_of = [score("wide_weight") for _ in below]
                total = math.log(sum(math.exp(z) for z in z_of))
                steps = [z - total for z in z_of]
            for child, step in zip(below, steps, strict=True):
                walk(child, value + step, False)

        walk(tree.to_nested(), 0.0, True)
        terms.append([float(mixture.log_gate[row, t]) + value for value in log_prob])
    return [math.log(sum(math.exp(term) for term in of)) for of in zip(*terms, strict=True)]


def huffman(
    classes: int, trees: int = 1, root: int = 1, leaf: int = 1, order: float = 1.0
) -> list[Tree]:
    frequencies = np.arange(1, classes + 1) ** -order
    return build_ensemble("huffman", classes, trees, frequencies, None, 0, root, leaf)


def random_trees(classes: int, n_trees: int) -> list[Tree]:
    """Of different numbers of nodes, each of 2 to 5 children, the root of 4."""
    random = np.random.default_rng(classes)

    def split(leaves: list[int], width: int) -> Any:
        if len(leaves) == 1:
            return leaves[0]
        width = min(len(leaves), width)
        cuts = np.sort(random.choice(np.arange(1, len(leaves)), width - 1, replace=False))
        return tuple(
            split(leaves[a:b], int(random.integers(2, 6)))
            for a, b in zip([0, *cuts], [*cuts, len(leaves)], strict=True)
        )

    return [
        Tree.from_nested(split(random.permutation(classes).tolist(), 4)) for _ in range(n_trees)
    ]


MIXTURES = {
    "one binary tree": lambda: draw(huffman(23)),
    "binary trees over subsets": lambda: draw(huffman(37, 3), features=40, subset=17),
    "wide root": lambda: draw(huffman(50, 2, root=8), subset=7),
    "wide root, groups of leaves": lambda: draw(huffman(60, 3, root=6, leaf=5), rows=3),
    "shared leaves": lambda: draw(huffman(60, 3, root=6, leaf=5), subset=9, leaves=True),
    "shared leaves of random wide trees": lambda: draw(random_trees(41, 4), leaves=True),
    "two classes, shared": lambda: draw(huffman(2, 2), leaves=True, bias=False),
    "random wide trees": lambda: draw(random_trees(41, 4), bias=False),
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


def wide_groups(leaves: bool) -> Mixture:
    """Groups of more leaves than a block holds scores, and of fewer."""
    groups = (tuple(range(1200)), tuple(range(1200, 1205)), 1205)
    first, second = Tree.from_nested(groups), Tree.from_nested((1205, *groups[:2]))
    return draw([first, second], rows=2, features=6, scale=1.0, leaves=leaves)


# Of features and of groups on CUDA.
BLOCKS = {
    "features of several accesses": lambda: draw(huffman(30, 2, root=5, leaf=4), features=301),
    "aligned rows": lambda: draw(huffman(30, 2, root=5, leaf=4), features=528),
    "aligned rows of subsets": lambda: draw(
        huffman(60, 3, root=6, leaf=5), features=48, subset=16, leaves=True
    ),
    "no features, shared leaves": lambda: draw(huffman(16, 2, leaf=4), features=0, leaves=True),
    "wide groups": lambda: wide_groups(leaves=False),
    "wide groups, shared": lambda: wide_groups(leaves=True),
}


def corrupted(seed: int, random: np.random.Generator) -> Mixture | None:
    """A mixture with wrong numbers in one of its tables; None where that table is missing."""
    names = [name for name in MIXTURES if name not in ("no rows", "no features")]
    mixture = MIXTURES[names[seed % len(names)]]()
    table = ("node", "edge", "leaf_edge", "feature_index")[random.integers(4)]
    if getattr(mixture, table) is None:
        return None
    return replace(mixture, **{table: corrupt(getattr(mixture, table), random)})
