"""Trees as nested tuples of class ids."""

from __future__ import annotations

from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from hstree._checks import check_int
from hstree.trees.tables import MAX_CLASSES, MAX_DEPTH, TreeEdges

IntArray = npt.NDArray[np.integer[Any]]
Nested: TypeAlias = Union[int, "tuple[Nested, ...]"]


def parents_of_nested(nested: Any) -> tuple[list[int], list[int]]:
    """Parent and class of every node, the arguments of :meth:`hstree.trees.Tree.from_parents`."""
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
                f"{name}: expected at most MAX_DEPTH = {MAX_DEPTH} nested tuples, got more"
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


def nested_of(order: IntArray, node_offset: IntArray, edges: TreeEdges) -> Nested:
    """The nested tuples of a tree given by its arrays."""
    child_node, begin = edges.child_node.tolist(), edges.begin.tolist()
    classes, offset = order.tolist(), node_offset.tolist()
    if len(offset) == 1:
        return 0
    of_node: dict[int, Nested] = {}
    # In preorder, so that backwards the nodes below one are ready before it.
    for m in range(len(offset) - 2, -1, -1):
        children = range(offset[m] - m, offset[m + 1] - m - 1)
        of_node[m] = tuple(
            classes[begin[e]] if child_node[e] < 0 else of_node.pop(child_node[e]) for e in children
        )
    return of_node[0]
