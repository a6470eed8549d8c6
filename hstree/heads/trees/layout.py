"""Where the vectors of the nodes lie, and the tables of the trees for the ops.

A tree has up to four kinds of nodes: a binary node has one vector, a wide node has one for each
child, and a wide root is a separate kind. Leaf groups, nodes whose children are all classes, are a
kind of their own if all trees share an output embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.tables import Tables
from hstree.trees import Tree, TreeTables

IntArray = npt.NDArray[np.int64]

KINDS = BINARY, WIDE, LEAF, ROOT = 0, 1, 2, 3
"""Kinds of nodes, in the order of their scores for :func:`hstree.ops.tree_log_softmax`."""

_BLOCK = np.array([0, 1, 1, 2])
"""Block of each kind in the tables of :func:`hstree.ops.tree_log_softmax`: leaf groups follow
the wide nodes."""


class TreeLayout:
    """Positions of the vectors of one tree. The vectors of each kind of node are contiguous, with
    the nodes in preorder.

    Attributes:
        tree: the tree.
        kind: kind of each node, int64 [M].
        first_row: position of each node's first vector among those of its kind, int64 [M].
        edge: for each kind, the edge of each vector, int64 [R]: the edge to its child at a wide
            node, to the left child at a binary node.
        row: for each kind, the position of each of these vectors, int64 [R]. In a leaf group it is
            the position of the leaf, elsewhere 0 to R - 1.

    Args:
        tree: the tree.
        leaf_groups: whether leaf groups are a kind of their own. A wide root is none.
    """

    def __init__(self, tree: Tree, *, leaf_groups: bool = False) -> None:
        edges = tree.edges()
        self.tree = tree
        self.kind: IntArray = np.where(tree.n_children == 2, BINARY, WIDE).astype(np.int64)
        if leaf_groups:
            above_inner = np.zeros(tree.n_nodes, bool)
            above_inner[edges.node[edges.child_node >= 0]] = True
            self.kind[~above_inner] = LEAF
        if tree.root_width > 2:
            self.kind[0] = ROOT
        of_edge, left = self.kind[edges.node], edges.ordinal == 0
        self.edge: tuple[IntArray, ...] = tuple(
            np.flatnonzero((of_edge == kind) & (left if kind == BINARY else True)) for kind in KINDS
        )
        self.row: tuple[IntArray, ...] = tuple(
            edges.begin[edge].astype(np.int64) if kind == LEAF else np.arange(len(edge))
            for kind, edge in enumerate(self.edge)
        )
        self.first_row: IntArray = np.zeros(tree.n_nodes, np.int64)
        for edge, row in zip(self.edge, self.row, strict=True):
            first = left[edge]
            self.first_row[edges.node[edge[first]]] = row[first]

    @property
    def leaf_classes(self) -> npt.NDArray[np.int32]:
        """Classes in leaf groups, from the left."""
        return self.tree.order[self.row[LEAF]]

    def root_classes(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Rows of a wide root whose children are classes, and these classes."""
        edges = self.tree.edges()
        row = np.flatnonzero(edges.child_node[self.edge[ROOT]] < 0)
        return row, self.tree.order[edges.begin[self.edge[ROOT][row]]]

    @property
    def widest_group(self) -> int:
        """Largest number of classes in a leaf group; 0 if there is none."""
        return int(self.tree.n_children[self.kind == LEAF].max(initial=0))

    @property
    def n_last_nodes(self) -> int:
        """Number of nodes that have a child that is a class."""
        edges = self.tree.edges()
        return len(np.unique(edges.node[edges.child_node < 0]))

    def paths(self) -> TreeTables:
        """:meth:`hstree.trees.Tree.tables` of the tree, without its leaf groups: the tables of
        :func:`hstree.ops.path_log_prob` and :func:`hstree.ops.wide_log_prob`, with the binary nodes
        and the rows of the wide nodes of this layout."""
        tables, tree = self.tree.tables(), self.tree
        if not len(self.edge[LEAF]):
            return tables
        # The tables of the tree know two kinds of nodes. Leaf groups of two classes are binary
        # nodes there, and larger ones are wide. Their entries are taken out of the paths, and the
        # numbers of the nodes that remain become those of the layout, which does not count them.

        # An entry of path is (number among all binary nodes) << 1 | goes_left.
        binary = np.flatnonzero(tree.n_children == 2)
        node = binary[tables.path >> 1]
        kept = self.kind[node] == BINARY
        goes_left = tables.path[kept] & 1
        path = self.first_row[node[kept]].astype(np.int32) << 1 | goes_left
        path_offset = _kept_offset(tables.path_offset, kept)

        # An entry of wide_path is (first row of the node among the rows of all wide nodes, number
        # of children, child). A wide root has tables of its own.
        wide = 1 + np.flatnonzero(tree.n_children[1:] > 2)
        first_row = np.cumsum(tree.n_children[wide]) - tree.n_children[wide]
        node = wide[np.searchsorted(first_row, tables.wide_path[:, 0])]
        kept = self.kind[node] == WIDE
        wide_path = tables.wide_path[kept]
        wide_path[:, 0] = self.first_row[node[kept]]
        wide_offset = _kept_offset(tables.wide_offset, kept)

        # max_width is the largest sum of the widths of the wide nodes on the path of a class.
        width_before = np.concatenate([[0], np.cumsum(wide_path[:, 1])])[wide_offset]
        return replace(
            tables,
            path_offset=path_offset,
            path=path,
            wide_offset=wide_offset,
            wide_path=wide_path,
            n_binary=len(self.edge[BINARY]),
            n_wide_rows=len(self.edge[WIDE]),
            max_depth=int(np.diff(path_offset).max()),
            max_width=int(np.diff(width_before).max()),
        )

    def groups(self) -> dict[str, npt.NDArray[Any]]:
        """Tables of :func:`hstree.ops.leaf_log_prob`: group [P, 3] and group_offset [V + 1]."""
        edges, edge = self.tree.edges(), self.edge[LEAF][np.argsort(self.leaf_classes)]
        node = edges.node[edge]
        group = np.stack([self.first_row[node], self.tree.n_children[node], edges.ordinal[edge]], 1)
        in_group = np.zeros(self.tree.n_classes + 1, np.int64)
        in_group[self.leaf_classes + 1] = 1
        return {"group": group.astype(np.int32), "group_offset": in_group.cumsum()}

    def nodes(self, leaf_begin: int = 0) -> dict[str, npt.NDArray[np.int32]]:
        """Tables of one tree for :func:`hstree.ops.tree_topk` and
        :func:`hstree.ops.tree_log_softmax`: node [M, 5], edge [E, 2] and leaf_edge [V].

        Args:
            leaf_begin: first row of the leaf groups in the block of the wide nodes.
        """
        tree, edges = self.tree, self.tree.edges()
        first_edge = tree.node_offset[:-1] - np.arange(tree.n_nodes)
        below = np.flatnonzero(edges.child_node >= 0)
        above = np.full(tree.n_nodes, -1)
        above[edges.child_node[below]] = below
        leaf = np.flatnonzero(edges.child_node < 0)
        classes = tree.order[edges.begin[leaf]]
        child = edges.child_node.copy()
        child[leaf] = ~classes
        leaf_edge = np.full(tree.n_classes, -1)
        leaf_edge[classes] = leaf
        row = self.first_row + np.where(self.kind == LEAF, leaf_begin, 0)
        node = [_BLOCK[self.kind], row, first_edge, tree.n_children, above]
        tables = {
            "node": np.stack(node, 1),
            "edge": np.stack([edges.node, child], 1),
            "leaf_edge": leaf_edge,
        }
        return {name: table.astype(np.int32) for name, table in tables.items()}


class Layout(Tables):
    """The tables of T trees, as tensors of one shape, padded to the largest tree. The trees and the
    feature subsets are saved; the other tables follow from them.

    Args:
        trees: T trees over V classes, with roots of the same width.
        leaf_groups: whether leaf groups are a kind of their own, with ``leaf_class`` and the tables
            of :func:`hstree.ops.leaf_log_prob`.
        feature_index: features that each tree reads, int32 [T, S], increasing; None: all.

    Attributes:
        trees: layout of each tree.
        n_trees, n_classes: T and V.
        n_rows: for each kind, the largest number of vectors in a tree; V for leaf groups.
        mean_group: mean number of children that are classes, of the nodes that have any.
        max_depth, max_width, max_group: arguments of :func:`hstree.ops.path_log_prob`,
            :func:`hstree.ops.wide_log_prob` and :func:`hstree.ops.leaf_log_prob`.
        path_offset, path, wide_offset, wide_path, leaf_position: tables of the first two ops.
        group_offset, group: tables of the third.
        root_child: int32 [T, V + 2], child of a wide root that holds the class. Entry V, for bad
            targets, is a child that does not exist; the last entry, for target -1, is -1.
        node, edge, leaf_edge: tables of :func:`hstree.ops.tree_topk`, padded with zeros.
        leaf_class: int32 [T, V], class of each leaf.
        root_row, root_class: int64 [K], children of wide roots that are classes, as t C + child,
            and their classes.
    """

    path_offset: Tensor
    path: Tensor
    wide_offset: Tensor
    wide_path: Tensor
    leaf_position: Tensor
    root_child: Tensor
    node: Tensor
    edge: Tensor
    leaf_edge: Tensor
    leaf_class: Tensor
    group_offset: Tensor
    group: Tensor
    root_row: Tensor
    root_class: Tensor
    feature_index: Tensor | None

    def __init__(
        self,
        trees: Sequence[Tree],
        *,
        leaf_groups: bool = False,
        feature_index: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.trees = [TreeLayout(tree, leaf_groups=leaf_groups) for tree in trees]
        self.n_trees, self.n_classes = len(trees), trees[0].n_classes
        self.leaf_groups = leaf_groups
        self.n_rows = [max(len(tree.edge[kind]) for tree in self.trees) for kind in KINDS]
        if self.n_rows[LEAF]:
            self.n_rows[LEAF] = self.n_classes
        paths = [tree.paths() for tree in self.trees]
        self.max_depth = max(table.max_depth for table in paths)
        self.max_width = max(table.max_width for table in paths)
        self.max_group = max(tree.widest_group for tree in self.trees)
        last = sum(tree.n_last_nodes for tree in self.trees)
        self.mean_group = self.n_classes * self.n_trees / max(last, 1)
        self.feature_index = None
        if feature_index is not None:
            self.register_table("feature_index", feature_index)
        self.set_tables(self.tables_device)

    def tables(self) -> dict[str, Tensor]:
        paths = [tree.paths() for tree in self.trees]
        out = {"leaf_position": np.stack([table.leaf_position for table in paths])}
        of_trees = [vars(table) for table in paths]
        out |= _joined(of_trees, "path", "path_offset")
        out |= _joined(of_trees, "wide_path", "wide_offset")
        if paths[0].root_child is not None:
            children = np.stack([np.asarray(table.root_child) for table in paths])
            beyond = np.tile(np.array([paths[0].root_width, -1], np.int32), (self.n_trees, 1))
            out["root_child"] = np.concatenate([children, beyond], 1)
        nodes = [tree.nodes(self.n_rows[WIDE]) for tree in self.trees]
        out |= {name: _stack([tables[name] for tables in nodes]) for name in nodes[0]}
        if self.leaf_groups:
            out["leaf_class"] = np.stack([layout.tree.order for layout in self.trees])
            out |= _joined([layout.groups() for layout in self.trees], "group", "group_offset")
            rows, classes = zip(*(layout.root_classes() for layout in self.trees), strict=True)
            place = [t * self.n_rows[ROOT] + row for t, row in enumerate(rows)]
            out["root_row"] = np.concatenate(place).astype(np.int64)
            out["root_class"] = np.concatenate(classes).astype(np.int64)
        computed = {name: torch.tensor(table, device="cpu") for name, table in out.items()}
        return super().tables() | computed

    def saved_tables(self) -> dict[str, Tensor]:
        trees = {
            f"trees.{t}.{name}": torch.tensor(array, device="cpu")
            for t, layout in enumerate(self.trees)
            for name, array in layout.tree.arrays().items()
        }
        return super().saved_tables() | trees

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Scores and log-probabilities that the log-probabilities of all classes take for a row:
        scores of the nodes, of each kind and all of them together, and those of the classes.
        Kernels for the CPU and CUDA read the products of the classes in leaf groups where they
        are."""
        of_leaves = self.n_rows[LEAF]
        scores = 2 * self.n_trees * (sum(self.n_rows) - of_leaves)
        scores += of_leaves if device.type in ("cpu", "cuda") else 2 * self.n_trees * of_leaves
        return scores + self.n_classes


def _joined(
    tables: Sequence[Mapping[str, npt.NDArray[Any]]], path: str, offset: str
) -> dict[str, npt.NDArray[Any]]:
    """The concatenated paths of all trees, and their offsets [T, V + 1]."""
    paths = [table[path] for table in tables]
    starts = np.cumsum([0, *map(len, paths[:-1])])
    return {
        path: np.concatenate(paths),
        offset: np.stack([table[offset] for table in tables]) + starts[:, None],
    }


def _stack(tables: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Tables [R, ...] of different lengths, padded with zeros and stacked to [T, R, ...]."""
    rows = max(len(table) for table in tables)
    out = np.zeros((len(tables), rows, *tables[0].shape[1:]), tables[0].dtype)
    for t, table in enumerate(tables):
        out[t, : len(table)] = table
    return out


def _kept_offset(offset: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> IntArray:
    # As many entries lie before a class as were kept before its old offset.
    return np.concatenate([[0], np.cumsum(kept)])[offset].astype(np.int64)
