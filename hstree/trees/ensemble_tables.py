"""The tables of several trees over the same classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree.trees.tables import TableSizes
from hstree.trees.tree import Tree


def ensemble_tables(
    trees: Sequence[Tree], sizes: Sequence[TableSizes], groups: bool
) -> dict[str, npt.NDArray[Any]]:
    """The tables of T trees over V classes, which each tree writes where they stay: on the way
    there is nothing of their size.

    Args:
        trees: the trees.
        sizes: :func:`hstree.trees.tables.table_sizes` of each.
        groups: whether they are trees of two levels.

    Returns:
        By name, with the largest numbers of nodes M and of edges E, and zeros behind those of a
        smaller tree:

        - ``node`` int32 [T, M, 5], ``edge`` int32 [T, E, 2] and ``leaf_edge`` int32 [T, V]: tables
          of :func:`hstree.ops.tree_topk` and :func:`hstree.ops.tree_log_softmax`.
        - With wide roots ``root_child`` int32 [T, V + 2], whose last two entries are free.
        - With groups ``order`` int32 [T, V] and ``begin`` int32 [T, C + 1]: tables of
          :func:`hstree.ops.group_log_prob`.
        - Without, ``leaf_position`` int32 [T, V], ``path_offset`` int64 [T, V + 1] and ``path``,
          one array for all trees: tables of :func:`hstree.ops.path_log_prob`.
    """
    n_trees, n_classes, width = len(trees), trees[0].n_classes, sizes[0].root_width
    rows: dict[str, npt.NDArray[Any]] = {
        "node": np.zeros((n_trees, max(tree.n_nodes for tree in trees), 5), np.int32),
        "edge": np.zeros((n_trees, max(tree.n_edges for tree in trees), 2), np.int32),
        "leaf_edge": np.empty((n_trees, n_classes), np.int32),
    }
    if width:
        rows["root_child"] = np.empty((n_trees, n_classes + 2), np.int32)
    shared: dict[str, npt.NDArray[Any]] = {}
    if not groups:
        rows["leaf_position"] = np.empty((n_trees, n_classes), np.int32)
        rows["path_offset"] = np.empty((n_trees, n_classes + 1), np.int64)
        shared["path"] = np.empty(sum(of_tree.n_path for of_tree in sizes), np.int32)
    path_begin = 0
    for t, tree in enumerate(trees):
        places: dict[str, Any] = shared | {name: table[t] for name, table in rows.items()}
        arrays = (tree.order, tree.node_offset, tree.boundary)
        _host.write_tables(*arrays, groups, path_begin=path_begin, **places)
        path_begin += sizes[t].n_path
    if groups:
        rows["order"] = np.stack([tree.order for tree in trees])
        rows["begin"] = np.stack([tree.boundary[: width + 1] for tree in trees])
    return rows | shared
