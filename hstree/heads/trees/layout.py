"""Where the vectors of the nodes lie, and the tables of the trees for the ops.

A tree has up to four kinds of nodes: a binary node has one vector, a wide node has one for each
child, and a wide root is a separate kind. Leaf groups, nodes whose children are all classes, are a
kind of their own if all trees share an output embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.tables import Tables
from hstree.trees import Tree

IntArray = npt.NDArray[np.int64]

KINDS = BINARY, WIDE, LEAF, ROOT = 0, 1, 2, 3
"""Kinds of nodes, in the order of their scores for :func:`hstree.ops.tree_log_softmax`."""

_BLOCK = np.array([0, 1, 1, 2])
"""Block of each kind in the tables of :func:`hstree.ops.tree_log_softmax`: leaf groups follow
the wide nodes."""

_PATHS = (
    (BINARY, "path", "path_offset"),
    (WIDE, "wide_path", "wide_offset"),
    (LEAF, "group", "group_offset"),
)
"""Tables of the paths of the classes through the nodes of a kind."""


class TreeLayout:
    """Positions of the vectors of one tree. The vectors of each kind of node are contiguous, with
    the nodes in preorder.

    Attributes:
        tree: the tree.
        kind: kind of each node, int8 [M].
        first_row: position of each node's first vector among those of its kind, int64 [M]. In a
            leaf group it is the position of the first leaf.
        edge: for each kind, the edge of each vector, int32 [R]: the edge to its child at a wide
            node, to the left child at a binary node.

    Args:
        tree: the tree.
        leaf_groups: whether leaf groups are a kind of their own. A wide root is none.
    """

    def __init__(self, tree: Tree, *, leaf_groups: bool = False) -> None:
        self.tree = tree
        # A node has one boundary more than children, so that the first edge of node m is
        # node_offset[m] - m.
        first, last = tree.node_offset[:-1], tree.node_offset[1:] - 1
        n_children, begin = tree.n_children, tree.boundary[first]
        self.kind: npt.NDArray[np.int8] = np.where(n_children == 2, BINARY, WIDE).astype(np.int8)
        if leaf_groups:
            # As many leaves below it as children: all its children are classes.
            self.kind[tree.boundary[last] - begin == n_children] = LEAF
        if tree.root_width > 2:
            self.kind[0] = ROOT
        of_edge = np.repeat(self.kind, n_children)
        left = (first - np.arange(tree.n_nodes))[self.kind == BINARY]
        self.edge: tuple[npt.NDArray[np.int32], ...] = tuple(
            (left if kind == BINARY else np.flatnonzero(of_edge == kind)).astype(np.int32)
            for kind in KINDS
        )
        # Right for leaf groups, whose rows are leaves; each other kind counts its own vectors.
        self.first_row: IntArray = begin.astype(np.int64)
        for kind in (BINARY, WIDE, ROOT):
            rows = np.where(self.kind == kind, 1 if kind == BINARY else n_children, 0)
            np.copyto(self.first_row, rows.cumsum() - rows, where=self.kind == kind)

    @property
    def leaf_classes(self) -> npt.NDArray[np.int32]:
        """Classes in leaf groups, from the left."""
        return self.tree.order[self.tree.edges().begin[self.edge[LEAF]]]

    def root_classes(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Rows of a wide root whose children are classes, and these classes."""
        bounds = self.tree.boundary[: len(self.edge[ROOT]) + 1]
        row = np.flatnonzero(np.diff(bounds) == 1)
        return row, self.tree.order[bounds[row]]

    def nodes(self, leaf_begin: int = 0) -> dict[str, npt.NDArray[np.int32]]:
        """Tables of one tree for :func:`hstree.ops.tree_topk` and
        :func:`hstree.ops.tree_log_softmax`: node [M, 5], edge [E, 2] and leaf_edge [V].

        Args:
            leaf_begin: first row of the leaf groups in the block of the wide nodes.
        """
        tree, edges = self.tree, self.tree.edges()
        edge = np.stack([edges.node, edges.child_node], 1)
        below, leaf = (np.flatnonzero(is_) for is_ in (edge[:, 1] >= 0, edge[:, 1] < 0))
        classes = tree.order[edges.begin[leaf]]
        # A complement is negative, also that of class 0, and so differs from every node.
        edge[leaf, 1] = ~classes
        leaf_edge = np.full(tree.n_classes, -1, np.int32)
        leaf_edge[classes] = leaf
        above = np.full(tree.n_nodes, -1)
        above[edges.child_node[below]] = below
        first_edge = tree.node_offset[:-1] - np.arange(tree.n_nodes)
        # Leaf groups have no rows in the scores. Numbers behind those of the wide nodes tell them
        # apart.
        row = self.first_row + np.where(self.kind == LEAF, leaf_begin, 0)
        node = [_BLOCK[self.kind], row, first_edge, tree.n_children, above]
        return {"node": np.stack(node, 1).astype(np.int32), "edge": edge, "leaf_edge": leaf_edge}


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
        path_offset, path, wide_offset, wide_path, group_offset, group: tables of these ops, if the
            trees have nodes of the kind.
        leaf_position: int32 [T, V], position of each class among the leaves.
        root_child: int32 [T, V + 2], child of a wide root that holds the class. Entry V, for bad
            targets, is a child that does not exist; the last entry, for target -1, is -1.
        node, edge, leaf_edge: tables of :func:`hstree.ops.tree_topk`, padded with zeros.
        leaf_class: int32 [T, V], class of each leaf.
        root_class: int64 [U], increasing, the classes that are children of wide roots.
        root_row, root_source: int64 [K], these children, as t C + child, and the positions of their
            classes in ``root_class``.
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
    root_class: Tensor
    root_row: Tensor
    root_source: Tensor
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
        self.feature_index = None
        if feature_index is not None:
            self.register_table("feature_index", feature_index)
        self.set_tables(self.tables_device)

    def tables(self) -> dict[str, Tensor]:
        """The tables. Also sets their largest sizes. Tree by tree, because what is computed on the
        way is larger than the tables."""
        n_classes, trees = self.n_classes, [layout.tree for layout in self.trees]
        shapes: dict[str, tuple[int, ...]] = {
            "leaf_position": (n_classes,),
            "node": (max(tree.n_nodes for tree in trees), 5),
            "edge": (max(tree.n_edges for tree in trees), 2),
            "leaf_edge": (n_classes,),
        }
        if self.leaf_groups:
            shapes["leaf_class"] = (n_classes,)
        if self.n_rows[ROOT]:
            shapes["root_child"] = (n_classes + 2,)
        out: dict[str, npt.NDArray[Any]] = {
            name: np.zeros((self.n_trees, *shape), np.int32) for name, shape in shapes.items()
        }
        parts: dict[str, list[npt.NDArray[Any]]] = {}
        for kind, path, offset in _PATHS:
            if self.n_rows[kind]:
                parts[path] = []
                out[offset] = np.empty((self.n_trees, n_classes + 1), np.int64)
        self.max_depth = self.max_width = self.max_group = n_last = 0
        for t, layout in enumerate(self.trees):
            tables, nodes = trees[t].tables(self.leaf_groups), layout.nodes(self.n_rows[WIDE])
            of_tree = vars(tables) | nodes | {"leaf_class": trees[t].order}
            for name in shapes:
                out[name][t, : len(of_tree[name])] = of_tree[name]
            for _, path, offset in _PATHS:
                if path in parts:
                    # The paths of all trees are one array: those of a tree begin after those of the
                    # trees before.
                    np.add(of_tree[offset], sum(map(len, parts[path])), out=out[offset][t])
                    parts[path].append(of_tree[path])
            self.max_depth = max(self.max_depth, tables.max_depth)
            self.max_width = max(self.max_width, tables.max_width)
            self.max_group = max(self.max_group, tables.max_group)
            # Nodes above classes.
            last = nodes["edge"][nodes["edge"][:, 1] < 0, 0]
            n_last += int(np.count_nonzero(np.bincount(last)))
        self.mean_group = n_classes * self.n_trees / max(n_last, 1)
        out |= {path: np.concatenate(of_trees) for path, of_trees in parts.items()}
        if self.n_rows[ROOT]:
            # Marked targets are indices too: V, and -1, which is the last entry.
            out["root_child"][:, n_classes:] = trees[0].root_width, -1
        if self.leaf_groups:
            rows, classes = zip(*(layout.root_classes() for layout in self.trees), strict=True)
            place = [t * self.n_rows[ROOT] + row for t, row in enumerate(rows)]
            out["root_row"] = np.concatenate(place).astype(np.int64)
            # A class that is a child of several roots has its row of E gathered once.
            unique, source = np.unique(np.concatenate(classes), return_inverse=True)
            out["root_class"], out["root_source"] = unique.astype(np.int64), source
        return super().tables() | {name: torch.from_numpy(table) for name, table in out.items()}

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
