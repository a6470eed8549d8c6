"""The layout of the node vectors of one tree.

A tree has up to four kinds of nodes: a binary node has one vector, a wide node has one for each
child, and a wide root is a separate kind. Leaf groups, nodes whose children are all classes, are a
kind of their own if all trees share an output embedding.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.trees import Tree

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
