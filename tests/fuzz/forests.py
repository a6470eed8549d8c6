"""Random trees as nested tuples, and their tables for the operators, in plain Python.

A node of a tree has one of three kinds, the numbers of which the operators read: binary, group,
whose children are classes, and wide root. Trees have groups below a wide root, or binary nodes
below a wide root or a binary one. The scores of binary nodes have one row each, those of a root one
for each child, those of groups one for each class of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

BINARY, GROUP, ROOT = KINDS = range(3)
PATHS = ("balanced", "random", "chain")
SHAPES = (*PATHS, "groups", "mixed")
DEEPEST = 60
SIZES = st.one_of(st.integers(1, 12), st.integers(13, 80), st.integers(81, 400))


def nested_tree(shape: str, n_classes: int, root: int, random: np.random.Generator) -> Any:
    """Nested tuples over the classes 0 .. V - 1 in random order; 0 for V = 1. The root has ``root``
    children, or for 0 as many as other nodes of the shape."""

    def cuts(n: int, depth: int) -> list[int]:
        parts = 2
        if depth == 0 and root:
            parts = min(root, n)
        elif shape == "groups" or depth >= DEEPEST:
            return list(range(n + 1))
        elif shape == "balanced" or depth > DEEPEST - 20:
            return [0, n // 2, n]
        elif shape == "chain":
            return [0, int(random.choice([1, n - 1])), n]
        elif shape == "mixed":
            parts = int(random.integers(2, min(n, 6) + 1))
        inner = 1 + random.choice(n - 1, parts - 1, replace=False)
        return [0, *sorted(inner.tolist()), n]

    def build(classes: list[int], depth: int) -> Any:
        if len(classes) == 1:
            return classes[0]
        places = cuts(len(classes), depth)
        return tuple(build(classes[begin:end], depth + 1) for begin, end in pairwise(places))

    return build(random.permutation(n_classes).tolist(), 0)


def classes_of(item: Any) -> list[int]:
    """Classes of a nested tuple, from left to right."""
    if not isinstance(item, tuple):
        return [item]
    return [c for child in item for c in classes_of(child)]


@dataclass
class Node:
    """An inner node: its kind, its first row among those of the kind, and its children, each the
    number of an inner node or ~class."""

    kind: int
    first_row: int
    children: list[int]


@dataclass
class Forest:
    """T trees over V classes, each a list of nodes in preorder, and the number of rows of each
    kind in the largest tree."""

    trees: list[list[Node]]
    orders: list[list[int]]
    n_rows: list[int]
    n_classes: int

    def paths(self, t: int) -> dict[int, list[tuple[Node, int]]]:
        """The nodes on the path of each class, root first, with the ordinal of the child."""
        above: list[list[tuple[Node, int]]] = [[] for _ in self.trees[t]]
        found: dict[int, list[tuple[Node, int]]] = {0: []}
        for number, node in enumerate(self.trees[t]):
            for k, child in enumerate(node.children):
                path = [*above[number], (node, k)]
                if child >= 0:
                    above[child] = path
                else:
                    found[~child] = path
        return found

    def path_tables(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Offsets [T, V + 1] and entries of the binary nodes, and the longest path."""
        offset = np.zeros((len(self.trees), self.n_classes + 1), np.int64)
        entries: list[int] = []
        for t in range(len(self.trees)):
            paths = self.paths(t)
            for c in range(self.n_classes):
                offset[t, c] = len(entries)
                nodes = [(node, k) for node, k in paths[c] if node.kind == BINARY]
                entries += [node.first_row << 1 | (k == 0) for node, k in nodes]
            offset[t, -1] = len(entries)
        return offset, np.array(entries, np.int32), int(np.diff(offset).max())

    def group_tables(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], int]:
        """cluster [T, V], order [T, V] and begin [T, C + 1] of trees with groups, and the size of
        the largest group."""
        cluster = np.zeros((len(self.trees), self.n_classes), np.int32)
        begins = []
        for t in range(len(self.trees)):
            for c, path in self.paths(t).items():
                cluster[t, c] = path[0][1] if path else 0
            begins.append([0, *np.bincount(cluster[t]).cumsum()])
        begin = np.array(begins, np.int32)
        return cluster, np.array(self.orders, np.int32), begin, int(np.diff(begin).max())

    @property
    def leaf_position(self) -> npt.NDArray[np.int32]:
        return np.argsort(np.array(self.orders), axis=1).astype(np.int32)

    def node_tables(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """node [T, m, 5], edge [T, E, 2] and leaf_edge [T, V]."""
        most = max(len(tree) for tree in self.trees)
        node = np.zeros((len(self.trees), most, 5), np.int32)
        edge = np.zeros((len(self.trees), most + self.n_classes - 1, 2), np.int32)
        leaf_edge = np.full((len(self.trees), self.n_classes), -1, np.int32)
        for t, tree in enumerate(self.trees):
            above, place = [-1] * len(tree), 0
            for number, item in enumerate(tree):
                n_children = len(item.children)
                node[t, number] = item.kind, item.first_row, place, n_children, above[number]
                for child in item.children:
                    edge[t, place] = number, child
                    if child >= 0:
                        above[child] = place
                    else:
                        leaf_edge[t, ~child] = place
                    place += 1
        return node, edge, leaf_edge


def plant(nested_trees: list[Any], *, groups: bool) -> Forest:
    """A forest of nested tuples: groups below the roots, or binary nodes."""
    n_classes = len(classes_of(nested_trees[0]))
    trees, n_binary, width = [], [0], 0
    for nested in nested_trees:
        nodes: list[Node] = []
        place = {c: i for i, c in enumerate(classes_of(nested))}

        def add(item: Any, nodes: Any = nodes, place: Any = place) -> int:
            number = len(nodes)
            kind, first = BINARY, sum(node.kind == BINARY for node in nodes)
            if number == 0 and (groups or len(item) > 2):
                kind, first = ROOT, 0
            elif groups:
                kind, first = GROUP, place[item[0]]
            nodes.append(Node(kind, first, []))
            nodes[number].children += [
                add(child) if isinstance(child, tuple) else ~child for child in item
            ]
            return number

        if isinstance(nested, tuple):
            add(nested)
            width = len(nested) if nodes[0].kind == ROOT else 0
        trees.append(nodes)
        n_binary.append(sum(node.kind == BINARY for node in nodes))
    n_rows = [max(n_binary), n_classes, width]
    return Forest(trees, [classes_of(nested) for nested in nested_trees], n_rows, n_classes)


def random_forest(
    n_trees: int,
    n_classes: int,
    shapes: list[str],
    random: np.random.Generator,
    *,
    groups: bool,
    wide_root: bool,
) -> Forest:
    """T random trees: with groups, or of shapes that are taken in turn, with a wide root or a
    binary one."""
    root = int(random.integers(min(n_classes, 2 if groups else 3), n_classes + 1))
    root = root if groups or wide_root else 0
    names = ["groups"] if groups else shapes
    nested = [nested_tree(names[t % len(names)], n_classes, root, random) for t in range(n_trees)]
    return plant(nested, groups=groups)
