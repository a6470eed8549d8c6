"""Random trees as nested tuples, and their tables for the operators, in plain Python.

A node of a tree has one of four kinds, the blocks of the operators: binary, wide, wide root, and
leaf group, whose children are all classes. The scores of binary nodes have one row each, those of
wide nodes one for each child, those of leaf groups one for each class of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt

BINARY, WIDE, ROOT, GROUP = KINDS = range(4)
SHAPES = ("balanced", "random", "chain", "flat", "wide root", "groups", "mixed")
DEEPEST = 60
SIZES = st.one_of(st.integers(1, 12), st.integers(13, 80), st.integers(81, 400))


def nested_tree(shape: str, n_classes: int, root: int, random: np.random.Generator) -> Any:
    """Nested tuples over the classes 0 .. V - 1 in random order; 0 for V = 1. A wide root has
    ``root`` children."""

    def cuts(n: int, depth: int) -> list[int]:
        if shape == "flat" or depth >= DEEPEST or (shape == "groups" and n <= 6):
            return list(range(n + 1))
        if shape == "balanced" or depth > DEEPEST - 20:
            return [0, n // 2, n]
        if shape == "chain":
            return [0, int(random.choice([1, n - 1])), n]
        parts = 2
        if shape == "mixed":
            parts = int(random.integers(2, min(n, 6) + 1))
        elif shape == "wide root" and depth == 0:
            parts = root
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

    def path_tables(self, kinds: set[int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
        """Offsets [T, V + 1], entries and the longest path (in rows) of the nodes of some kinds, as
        path_log_prob, wide_log_prob and leaf_log_prob read them."""
        offset = np.zeros((len(self.trees), self.n_classes + 1), np.int64)
        entries: list[Any] = []
        longest = 0
        for t in range(len(self.trees)):
            paths = self.paths(t)
            for c in range(self.n_classes):
                offset[t, c] = len(entries)
                nodes = [(n, k) for n, k in paths[c] if n.kind in kinds]
                if kinds == {BINARY}:
                    entries += [node.first_row << 1 | (k == 0) for node, k in nodes]
                    longest = max(longest, len(nodes))
                else:
                    entries += [(node.first_row, len(node.children), k) for node, k in nodes]
                    longest = max(longest, sum(len(node.children) for node, _ in nodes))
            offset[t, -1] = len(entries)
        shape = (-1,) if kinds == {BINARY} else (-1, 3)
        return offset, np.array(entries, np.int32).reshape(shape), longest

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
                block = WIDE if item.kind == GROUP else item.kind
                row = item.first_row + (self.n_rows[WIDE] if item.kind == GROUP else 0)
                node[t, number] = block, row, place, len(item.children), above[number]
                for child in item.children:
                    edge[t, place] = number, child
                    if child >= 0:
                        above[child] = place
                    else:
                        leaf_edge[t, ~child] = place
                    place += 1
        return node, edge, leaf_edge


def plant(nested_trees: list[Any], *, groups: bool, wide_root: bool) -> Forest:
    """A forest of nested tuples. groups: whether nodes whose children are all classes are leaf
    groups; wide_root: whether a wide root is a kind of its own."""
    n_classes = len(classes_of(nested_trees[0]))
    trees, counts = [], []
    for nested in nested_trees:
        nodes: list[Node] = []
        used = [0, 0, 0]
        place = {c: i for i, c in enumerate(classes_of(nested))}

        def add(item: Any, depth: int, nodes: Any = nodes, used: Any = used, place: Any = place):
            number = len(nodes)
            nodes.append(Node(BINARY, 0, []))
            if wide_root and depth == 0 and len(item) > 2:
                kind = ROOT
            elif groups and not any(isinstance(child, tuple) for child in item):
                kind = GROUP
            else:
                kind = BINARY if len(item) == 2 else WIDE
            first = place[item[0]] if kind == GROUP else used[kind]
            if kind != GROUP:
                used[kind] += 1 if kind == BINARY else len(item)
            children = [
                add(child, depth + 1) if isinstance(child, tuple) else ~child for child in item
            ]
            nodes[number] = Node(kind, first, children)
            return number

        if isinstance(nested, tuple):
            add(nested, 0)
        trees.append(nodes)
        counts.append(used)
    n_rows = [*np.max(counts, axis=0).tolist(), n_classes]
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
    """T random trees whose shapes are taken in turn. Wide roots have the same width."""
    root = int(random.integers(min(n_classes, 3), n_classes + 1))
    nested = [nested_tree(shapes[t % len(shapes)], n_classes, root, random) for t in range(n_trees)]
    widths = {len(tree) for tree in nested if isinstance(tree, tuple) and len(tree) > 2}
    wide_root = wide_root and len(widths) == 1
    return plant(nested, groups=groups, wide_root=wide_root)
