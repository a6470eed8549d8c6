"""The tables of several trees over the same classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree.trees.tables import TableSizes
from hstree.trees.tree import Tree

_OFFSET = {"path": "path_offset", "wide_path": "wide_offset", "group": "group_offset"}
_BEGIN = {"path": "path_begin", "wide_path": "wide_begin", "group": "group_begin"}


def ensemble_tables(
    trees: Sequence[Tree], sizes: Sequence[TableSizes], leaf_groups: bool
) -> dict[str, npt.NDArray[Any]]:
    """The tables of T trees over V classes, which each tree writes where they stay: on the way
    there is nothing of their size.

    Args:
        trees: the trees.
        sizes: :func:`hstree.trees.tables.table_sizes` of each.
        leaf_groups: whether leaf groups are a kind of their own.

    Returns:
        By name, with the largest numbers of nodes M and of edges E, and zeros behind those of a
        smaller tree:

        - ``node`` int32 [T, M, 5], ``edge`` int32 [T, E, 2] and ``leaf_edge`` int32 [T, V]: tables
          of :func:`hstree.ops.tree_topk` and :func:`hstree.ops.tree_log_softmax`.
        - ``leaf_position`` int32 [T, V], and with wide roots ``root_child`` int32 [T, V + 2], whose
          last two entries are free.
        - ``path_offset`` int64 [T, V + 1] and ``path``, ``wide_offset`` and ``wide_path``,
          ``group_offset`` and ``group``, if a tree has nodes of this kind. The paths of all trees
          are one array.
    """
    n_trees, n_classes = len(trees), trees[0].n_classes
    rows: dict[str, npt.NDArray[np.int32]] = {
        "node": np.zeros((n_trees, max(tree.n_nodes for tree in trees), 5), np.int32),
        "edge": np.zeros((n_trees, max(tree.n_edges for tree in trees), 2), np.int32),
        "leaf_edge": np.empty((n_trees, n_classes), np.int32),
        "leaf_position": np.empty((n_trees, n_classes), np.int32),
    }
    if sizes[0].root_width:
        rows["root_child"] = np.empty((n_trees, n_classes + 2), np.int32)
    lengths: dict[str, list[int]] = {}
    if any(of_tree.n_binary for of_tree in sizes):
        lengths["path"] = [of_tree.n_path for of_tree in sizes]
    if any(of_tree.n_wide_rows for of_tree in sizes):
        lengths["wide_path"] = [of_tree.n_wide_path for of_tree in sizes]
    if any(of_tree.n_group_rows for of_tree in sizes):
        lengths["group"] = [of_tree.n_group_rows for of_tree in sizes]
    offsets: dict[str, npt.NDArray[np.int64]] = {}
    paths: dict[str, npt.NDArray[np.int32]] = {}
    for name, of_trees in lengths.items():
        offsets[_OFFSET[name]] = np.empty((n_trees, n_classes + 1), np.int64)
        total = sum(of_trees)
        paths[name] = np.empty(total if name == "path" else (total, 3), np.int32)
    leaf_begin = max(of_tree.n_wide_rows for of_tree in sizes)
    for t, tree in enumerate(trees):
        places: dict[str, Any] = {"leaf_begin": leaf_begin} | paths
        places |= {name: table[t] for name, table in (rows | offsets).items()}
        places |= {_BEGIN[name]: sum(of_trees[:t]) for name, of_trees in lengths.items()}
        arrays = (tree.order, tree.node_offset, tree.boundary)
        _host.write_tables(*arrays, leaf_groups, **places)
    return rows | offsets | paths
