"""Where the vectors of the nodes lie, and the tables of the trees for the ops.

A tree has up to four kinds of nodes: a binary node has one vector, a wide node has one for each
child, and a wide root is a separate kind. Leaf groups, nodes whose children are all classes, are a
kind of their own if all trees share an output embedding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.state import Tables
from hstree.trees import Tree
from hstree.trees.ensemble_tables import ensemble_tables
from hstree.trees.tables import table_sizes

IntArray = npt.NDArray[np.int64]

KINDS = BINARY, WIDE, LEAF, ROOT = 0, 1, 2, 3
"""Kinds of nodes, in the order of their scores for :func:`hstree.ops.tree_log_softmax`."""


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
        self.tree, self.leaf_groups = tree, leaf_groups

    @cached_property
    def kind(self) -> npt.NDArray[np.int8]:
        tree, n_children = self.tree, self.tree.n_children
        first, last = tree.node_offset[:-1], tree.node_offset[1:] - 1
        kind: npt.NDArray[np.int8] = np.where(n_children == 2, BINARY, WIDE).astype(np.int8)
        if self.leaf_groups:
            # As many leaves below it as children: all its children are classes.
            kind[tree.boundary[last] - tree.boundary[first] == n_children] = LEAF
        if tree.root_width > 2:
            kind[0] = ROOT
        return kind

    @cached_property
    def edge(self) -> tuple[npt.NDArray[np.int32], ...]:
        # A node has one boundary more than children, so that the first edge of node m is
        # node_offset[m] - m.
        left = self.tree.node_offset[:-1] - np.arange(self.tree.n_nodes)
        of_edge = np.repeat(self.kind, self.tree.n_children)
        of_kinds = (
            left[self.kind == BINARY] if kind == BINARY else np.flatnonzero(of_edge == kind)
            for kind in KINDS
        )
        return tuple(edge.astype(np.int32) for edge in of_kinds)

    @cached_property
    def first_row(self) -> IntArray:
        tree = self.tree
        # Right for leaf groups, whose rows are leaves; each other kind counts its own vectors.
        first_row: IntArray = tree.boundary[tree.node_offset[:-1]].astype(np.int64)
        for kind in (BINARY, WIDE, ROOT):
            rows = np.where(self.kind == kind, 1 if kind == BINARY else tree.n_children, 0)
            np.copyto(first_row, rows.cumsum() - rows, where=self.kind == kind)
        return first_row

    @property
    def leaf_classes(self) -> npt.NDArray[np.int32]:
        """Classes in leaf groups, from the left."""
        return self.tree.order[self.tree.edges().begin[self.edge[LEAF]]]

    def root_classes(self) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Rows of a wide root whose children are classes, and these classes."""
        width = self.tree.root_width
        bounds = self.tree.boundary[: width + 1 if width > 2 else 0]
        row = np.flatnonzero(np.diff(bounds) == 1)
        return row, self.tree.order[bounds[row]]


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
        self._sizes = sizes = [
            table_sizes((tree.order, tree.node_offset, tree.boundary), leaf_groups)
            for tree in trees
        ]
        self.n_rows = [
            max(of_tree.n_binary for of_tree in sizes),
            max(of_tree.n_wide_rows for of_tree in sizes),
            self.n_classes if any(of_tree.n_group_rows for of_tree in sizes) else 0,
            sizes[0].root_width,
        ]
        self.max_depth = max(of_tree.max_depth for of_tree in sizes)
        self.max_width = max(of_tree.max_width for of_tree in sizes)
        self.max_group = max(of_tree.max_group for of_tree in sizes)
        n_last = sum(of_tree.n_last for of_tree in sizes)
        self.mean_group = self.n_classes * self.n_trees / max(n_last, 1)
        self.feature_index = None
        if feature_index is not None:
            self.register_table("feature_index", feature_index)
        self.set_tables(self.tables_device)

    def tables(self) -> dict[str, Tensor]:
        trees = [layout.tree for layout in self.trees]
        out = ensemble_tables(trees, self._sizes, self.leaf_groups)
        if self.leaf_groups:
            out["leaf_class"] = np.stack([tree.order for tree in trees])
        if self.n_rows[ROOT]:
            # Marked targets are indices too: V, and -1, which is the last entry.
            out["root_child"][:, self.n_classes :] = trees[0].root_width, -1
        if self.leaf_groups:
            rows, classes = zip(*(layout.root_classes() for layout in self.trees), strict=True)
            place = [t * self.n_rows[ROOT] + row for t, row in enumerate(rows)]
            out["root_row"] = np.concatenate(place).astype(np.int64)
            # A class that is a child of several roots has its row of E gathered once.
            unique, source = np.unique(np.concatenate(classes), return_inverse=True)
            out["root_class"], out["root_source"] = unique.astype(np.int64), source
        return super().tables() | {name: torch.from_numpy(table) for name, table in out.items()}

    def saved_items(self) -> Iterator[tuple[str, Tensor]]:
        yield from super().saved_items()
        for t, layout in enumerate(self.trees):
            for name, array in layout.tree.arrays().items():
                yield f"trees.{t}.{name}", torch.tensor(array, device="cpu")

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Scores and log-probabilities that the log-probabilities of all classes take for a row:
        scores of the nodes, of each kind and all of them together, and those of the classes.
        Kernels for the CPU and CUDA read the products of the classes in leaf groups where they
        are."""
        of_leaves = self.n_rows[LEAF]
        scores = 2 * self.n_trees * (sum(self.n_rows) - of_leaves)
        scores += of_leaves if device.type in ("cpu", "cuda") else 2 * self.n_trees * of_leaves
        return scores + self.n_classes
