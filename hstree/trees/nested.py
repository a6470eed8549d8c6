"""Trees as nested tuples of class ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np

from hstree._checks import check_int
from hstree.trees.tables import MAX_CLASSES, MAX_DEPTH

if TYPE_CHECKING:
    from hstree.trees.tree import Tree

Nested: TypeAlias = Union[int, "tuple[Nested, ...]"]


def parents_of_nested(nested: Any) -> tuple[list[int], list[int]]:
    """Parent and class of every node, as :meth:`hstree.trees.Tree.from_parents` takes them."""
    parent: list[int] = []
    leaf_class: list[int] = []
    where: list[str] = []

    def add(item: Any, above: int, name: str, depth: int) -> None:
        number = len(parent)
        parent.append(above)
        where.append(name)
        if not isinstance(item, (tuple, list)):
            if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
                raise TypeError(f"{name}: expected an integer or a tuple, got {item!r}")
            leaf_class.append(check_int(name, item, 0, MAX_CLASSES - 1))
            return
        leaf_class.append(-1)
        if len(item) < 2:
            raise ValueError(f"{name}: expected two entries or more, got {item!r}")
        if depth >= MAX_DEPTH:
            raise ValueError(
                f"{name}: expected at most MAX_DEPTH = {MAX_DEPTH} tuples in each other"
            )
        for i, child in enumerate(item):
            add(child, number, f"{name}[{i}]", depth + 1)

    add(nested, -1, "nested", 0)
    n_classes = sum(c >= 0 for c in leaf_class)
    first: dict[int, str] = {}
    for c, name in zip(leaf_class, where, strict=True):
        if c >= n_classes:
            raise ValueError(f"{name}: expected a class from 0 to {n_classes - 1}, got {c}")
        if c in first:
            raise ValueError(f"{name}: class {c} appears twice (first at {first[c]})")
        if c >= 0:
            first[c] = name
    return parent, leaf_class


def nested_of(tree: Tree) -> Nested:
    """The nested tuples of a tree."""
    if tree.n_nodes == 0:
        return 0
    edges = tree.edges()
    built: dict[int, Nested] = {}
    child_node, begin = edges.child_node.tolist(), edges.begin.tolist()
    order, offset = tree.order.tolist(), tree.node_offset.tolist()
    for m in range(tree.n_nodes - 1, -1, -1):
        children = range(offset[m] - m, offset[m + 1] - m - 1)
        built[m] = tuple(
            order[begin[e]] if child_node[e] < 0 else built.pop(child_node[e]) for e in children
        )
    return built[0]
