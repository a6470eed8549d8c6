"""The tables of :func:`hstree.ops.path_log_prob` and :func:`hstree.ops.wide_log_prob`: the nodes on
the paths of all classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.heads.trees.tree_layout import BINARY, LEAF, WIDE, IntArray, TreeLayout
from hstree.trees import TreeTables


def path_tables(layout: TreeLayout) -> TreeTables:
    """:meth:`hstree.trees.Tree.tables` of the tree, without its leaf groups: the binary nodes and
    the rows of the wide nodes are those of the layout."""
    tables, tree = layout.tree.tables(), layout.tree
    if not len(layout.edge[LEAF]):
        return tables
    # An entry of path is (number among the binary nodes) << 1 | goes_left. Leaf groups of two
    # classes are binary nodes too: those that remain are numbered anew, by the layout's rows.
    binary = np.flatnonzero(tree.n_children == 2)
    kept = layout.kind[binary[tables.path >> 1]] == BINARY
    path = tables.path[kept]
    path = layout.first_row[binary[path >> 1]].astype(np.int32) << 1 | path & 1
    offset = _kept_offset(tables.path_offset, kept)

    wide = 1 + np.flatnonzero(tree.n_children[1:] > 2)  # a wide root is not in these tables
    # An entry of wide_path names its node by the node's first row, counted over all wide nodes.
    first = np.cumsum(tree.n_children[wide]) - tree.n_children[wide]
    node = wide[np.searchsorted(first, tables.wide_path[:, 0])]
    kept = layout.kind[node] == WIDE
    wide_path = tables.wide_path[kept]
    wide_path[:, 0] = layout.first_row[node[kept]]
    wide_offset = _kept_offset(tables.wide_offset, kept)
    # Running sum of the widths where each class begins: its differences are sums over a class.
    width = np.concatenate([[0], np.cumsum(wide_path[:, 1])])[wide_offset]
    return replace(
        tables,
        path_offset=offset,
        path=path,
        wide_offset=wide_offset,
        wide_path=wide_path,
        n_binary=len(layout.edge[BINARY]),
        n_wide_rows=len(layout.edge[WIDE]),
        max_depth=int(np.diff(offset).max()),
        max_width=int(np.diff(width).max()),
    )


def _kept_offset(offset: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> IntArray:
    # As many entries lie before a class as were kept before its old offset.
    return np.concatenate([[0], np.cumsum(kept)])[offset].astype(np.int64)


def stacked_paths(tables: Sequence[TreeTables]) -> dict[str, npt.NDArray[Any]]:
    """The tables of all trees, and the children of wide roots."""
    out = {"leaf_position": np.stack([table.leaf_position for table in tables])}
    of_trees = [vars(table) for table in tables]
    out |= stacked(of_trees, "path", "path_offset")
    out |= stacked(of_trees, "wide_path", "wide_offset")
    if tables[0].root_child is not None:
        children = np.stack([np.asarray(table.root_child) for table in tables])
        beyond = np.tile(np.array([tables[0].root_width, -1], np.int32), (len(tables), 1))
        out["root_child"] = np.concatenate([children, beyond], 1)
    return out


def stacked(
    tables: Sequence[Mapping[str, npt.NDArray[Any]]], path: str, offset: str
) -> dict[str, npt.NDArray[Any]]:
    """The concatenated paths of all trees, and their offsets [T, V + 1]."""
    paths = [table[path] for table in tables]
    starts = np.cumsum([0, *map(len, paths[:-1])])
    return {
        path: np.concatenate(paths),
        offset: np.stack([table[offset] for table in tables]) + starts[:, None],
    }
