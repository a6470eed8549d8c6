"""The tables and edges derived from a tree, and their largest sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from hstree import _host

MAX_DEPTH: int = _host.MAX_DEPTH
"""Largest number of inner nodes on a path."""
MAX_CLASSES: int = _host.MAX_CLASSES
"""Largest number of classes of a tree."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TreeTables:
    """The tables of a tree over V classes that the kernels read; all arrays are read-only.

    Binary nodes are numbered 0 .. n_binary - 1 in preorder. A root with more than two children is
    wide, and not counted among them; so is any root of a tree of two levels
    (``Tree.tables(groups=True)``), which has no binary nodes.

    Attributes:
        leaf_position: position of each class among the leaves from the left, int32 [V].
        path_offset: the binary nodes on the path of class c are
            ``path[path_offset[c]:path_offset[c + 1]]``, int64 [V + 1].
        path: binary nodes on the paths, root first, as ``node << 1 | goes_left``, int32 [P].
        root_child: child of the root that holds each class, int32 [V]; None unless the root is
            wide.
        root_width: number of children of a wide root, else 0.
        n_binary: number of binary nodes.
        max_depth: largest number of binary nodes on a path.
        max_group: with two levels, largest number of classes of a node below the root.

    Example:
        >>> from hstree.trees import Tree
        >>> tables = Tree.from_nested((2, (0, 1))).tables()
        >>> tables.leaf_position.tolist(), tables.n_binary, tables.max_depth
        ([1, 2, 0], 2, 2)
    """

    leaf_position: Int32Array
    path_offset: Int64Array
    path: Int32Array
    root_child: Int32Array | None
    root_width: int
    n_binary: int
    max_depth: int
    max_group: int


@dataclass(frozen=True, eq=False)
class TreeEdges:
    """All E = M + V - 1 pairs (inner node, child), nodes in preorder, children left to right.

    Edge (m, k) has index ``tree.node_offset[m] - m + k``.

    Attributes:
        node: inner node above, int32 [E].
        ordinal: number of the child, counted from the left, int32 [E].
        child_node: inner node below, or -1 for a leaf, int32 [E].
        begin: first leaf position below, int32 [E].
        end: last leaf position below plus one, int32 [E].
        parent_edge: edge above ``node``, or -1 at the root, int32 [E].
        depth: number of edges above, 0 for the root's children, int32 [E].

    Example:
        >>> from hstree.trees import Tree
        >>> edges = Tree.from_nested((2, (0, 1))).edges()
        >>> edges.node.tolist(), edges.child_node.tolist()
        ([0, 0, 1, 1], [-1, 1, -1, -1])
    """

    node: Int32Array
    ordinal: Int32Array
    child_node: Int32Array
    begin: Int32Array
    end: Int32Array
    parent_edge: Int32Array
    depth: Int32Array


class TableSizes(NamedTuple):
    """How large the tables of a tree are; ``n_path`` is the number of entries of ``path``, the
    others are those of :class:`TreeTables`."""

    root_width: int
    n_binary: int
    n_path: int
    max_depth: int
    max_group: int


TreeArrays: TypeAlias = tuple[Int32Array, Int64Array, Int32Array]
"""``order``, ``node_offset`` and ``boundary`` of a :class:`hstree.trees.Tree`."""


def table_sizes(tree: TreeArrays, groups: bool) -> TableSizes:
    """Sizes of the tables of a tree, before they are made. Raises ValueError for a tree that has
    neither two levels nor, unless ``groups``, binary nodes below its root."""
    return TableSizes(*_host.table_sizes(*tree, groups))


def tree_tables(tree: TreeArrays, groups: bool) -> TreeTables:
    """See :meth:`hstree.trees.Tree.tables`."""
    sizes, n_classes = table_sizes(tree, groups), len(tree[0])
    out: dict[str, Any] = {
        "leaf_position": np.empty(n_classes, np.int32),
        "path_offset": np.empty(n_classes + 1, np.int64),
        "path": np.empty(sizes.n_path, np.int32),
    }
    if sizes.root_width:
        out["root_child"] = np.empty(n_classes, np.int32)
    _host.write_tables(*tree, groups, **out)
    for array in out.values():
        array.flags.writeable = False
    out.setdefault("root_child", None)
    return TreeTables(
        **out,
        root_width=sizes.root_width,
        n_binary=sizes.n_binary,
        max_depth=sizes.max_depth,
        max_group=sizes.max_group,
    )
