"""What is derived from a tree: the tables of the kernels, and the edges; and how large both may
be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hstree import _host

MAX_DEPTH: int = _host.MAX_DEPTH
"""Inner nodes on the longest path that a tree may have."""
MAX_CLASSES: int = _host.MAX_CLASSES
"""Classes that a tree may have."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TreeTables:
    """What the kernels read of a tree of V classes; arrays are read-only.

    Binary nodes are renumbered 0 .. n_binary - 1 in preorder, and the rows of all wide nodes other
    than a wide root 0 .. n_wide_rows - 1, nodes in preorder and children from left to right. A wide
    root's rows are its children.

    Attributes:
        leaf_position: int32 [V], position of each class among the leaves from the left.
        path_offset: int64 [V + 1], class c's binary nodes are
            ``path[path_offset[c]:path_offset[c + 1]]``.
        path: int32 [P], ``node << 1 | goes_left``, root first.
        wide_offset: int64 [V + 1], class c's wide nodes are
            ``wide_path[wide_offset[c]:wide_offset[c + 1]]``.
        wide_path: int32 [Pw, 3], (first_row, width, child) of the wide nodes other than the root,
            root first.
        root_child: int32 [V], child of the root that holds the class; None unless the root is wide.
        root_width: number of children of a wide root, else 0.
        n_binary: number of binary nodes.
        n_wide_rows: number of rows of the wide nodes other than the root.
        max_depth: binary nodes on the path of the class that has most of them.
        max_width: largest sum of widths over the ``wide_path`` of a class.
    """

    leaf_position: Int32Array
    path_offset: Int64Array
    path: Int32Array
    wide_offset: Int64Array
    wide_path: Int32Array
    root_child: Int32Array | None
    root_width: int
    n_binary: int
    n_wide_rows: int
    max_depth: int
    max_width: int


@dataclass(frozen=True, eq=False)
class TreeEdges:
    """All E = M + V - 1 pairs (inner node, child), nodes in preorder, children left to right.

    Edge (m, k) has index ``tree.node_offset[m] - m + k``.

    Attributes:
        node: int32 [E], inner node above.
        ordinal: int32 [E], which child of it.
        child_node: int32 [E], inner node below, or -1 for a leaf.
        begin, end: int32 [E], the leaf positions [begin, end) below.
        parent_edge: int32 [E], edge above ``node``, or -1 at the root.
        depth: int32 [E], edges above; 0 for the root's children.
    """

    node: Int32Array
    ordinal: Int32Array
    child_node: Int32Array
    begin: Int32Array
    end: Int32Array
    parent_edge: Int32Array
    depth: Int32Array
