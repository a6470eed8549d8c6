"""The layout of the node vectors of each tree, and the tables of all trees for the ops.

A tree has three kinds of nodes: a binary node has one vector, a wide node has one for each child,
and a wide root is a separate kind. All trees share tensors of one shape, padded to the largest
tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.buffers import Tables
from hstree.trees import Tree

IntArray = npt.NDArray[np.int64]


KINDS = BINARY, WIDE, ROOT = 0, 1, 2
"""Kinds of nodes, with the numbers of :func:`hstree.ops.tree_topk`."""


class TreeLayout:
    """Positions of the vectors of one tree. The vectors of each kind of node are contiguous, with
    the nodes in preorder.

    Attributes:
        tree: the tree.
        kind: kind of each node, int64 [M].
        first_row: position of each node's first vector among those of its kind, int64 [M].
        edge: for each kind, the edge of each vector, int64 [R]: the edge to its child at a wide
            node, to the left child at a binary node.
    """

    def __init__(self, tree: Tree) -> None:
        edges = tree.edges()
        self.tree = tree
        self.kind: IntArray = np.where(tree.n_children == 2, BINARY, WIDE).astype(np.int64)
        if tree.root_width > 2:
            self.kind[0] = ROOT
        of_edge, left = self.kind[edges.node], edges.ordinal == 0
        self.edge: tuple[IntArray, ...] = tuple(
            np.flatnonzero((of_edge == kind) & (left if kind == BINARY else True)) for kind in KINDS
        )
        self.first_row: IntArray = np.zeros(tree.n_nodes, np.int64)
        for edge in self.edge:
            first = np.flatnonzero(left[edge])
            self.first_row[edges.node[edge[first]]] = first

    def nodes(self) -> dict[str, npt.NDArray[np.int32]]:
        """Tables of one tree for :func:`hstree.ops.tree_topk` and
        :func:`hstree.ops.tree_log_prob`: node [M, 5], edge [E, 2] and leaf_edge [V]."""
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
        node = [self.kind, self.first_row, first_edge, tree.n_children, above]
        tables = {
            "node": np.stack(node, 1),
            "edge": np.stack([edges.node, child], 1),
            "leaf_edge": leaf_edge,
        }
        return {name: table.astype(np.int32) for name, table in tables.items()}

    def bounds(self, kind: int) -> IntArray:
        """Begin and end of the leaves below each vector's edge, int64 [R, 2]. For binary nodes
        int64 [R, 3]: begin of the left child's leaves, begin and end of the right child's."""
        edges, edge = self.tree.edges(), self.edge[kind]
        columns = [edges.begin[edge], edges.end[edge]]
        if kind == BINARY:
            columns.append(edges.end[edge + 1])
        return np.stack(columns, 1).astype(np.int64)


class TreeArrays(Tables):
    """The arrays of a tree in the state dict. Loading checks that they agree with the tree."""

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = tree
        self.register_tables(persistent=True)

    def tables(self) -> Mapping[str, npt.NDArray[Any]]:
        return self.tree.arrays()

    @staticmethod
    def tree_of(tensors: Mapping[str, Tensor], prefix: str) -> Tree:
        """The tree stored in a state dict."""
        names = ("order", "node_offset", "boundary")
        return Tree(**{name: tensors[prefix + name].numpy() for name in names})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for name, array in self.tree.arrays().items():
            loaded, own = state_dict.get(prefix + name), torch.from_numpy(np.array(array))
            if loaded is None:
                missing_keys.append(prefix + name)
            elif loaded.shape != own.shape or not torch.equal(loaded.to(own), own):
                error_msgs.append(
                    f"{prefix}{name}: the weights belong to another tree than this head's; "
                    "build the head with the trees it was saved with (hstree.heads.load_head does)"
                )
                return
        self.rebuild()


class Layout(Tables):
    """Tables of T trees, as buffers that move with the module and are not saved.

    They are rebuilt when a state is loaded into this module or a module around it, and when one of
    them is assigned: ``from_pretrained`` of transformers assigns empty tensors.

    Args:
        trees: T trees over V classes, with roots of the same width.
        n_classes: number of classes, V.
        bounds: whether to build ``leaf_class`` and the bounds.

    Raises:
        ValueError: for no tree, or trees of different sizes or root widths.

    Attributes:
        trees: layout of each tree.
        n_rows: for each kind, the largest number of vectors in a tree.
        max_depth, max_width: arguments of :func:`hstree.ops.path_log_prob` and
            :func:`hstree.ops.wide_log_prob`.
        path_offset, path, wide_offset, wide_path, leaf_position: tables of these two ops.
        root_child: int32 [T, V + 2], child of a wide root that holds the class. Entry V, for bad
            targets, is a child that does not exist; the last entry, for target -1, is -1.
        node, edge, leaf_edge: tables of :func:`hstree.ops.tree_topk`, padded with zeros.
        leaf_class: int64 [T, V], class of each leaf.
        bounds_0, bounds_1, bounds_2: :meth:`TreeLayout.bounds` of each kind, int64 [T, R, .].
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

    def __init__(self, trees: Sequence[Tree], n_classes: int, *, bounds: bool = False) -> None:
        super().__init__()
        check_trees(trees, n_classes)
        self.trees = [TreeLayout(tree) for tree in trees]
        self.has_bounds = bounds
        self.n_rows = [max(len(tree.edge[kind]) for tree in self.trees) for kind in KINDS]
        tables = [tree.tables() for tree in trees]
        self.max_depth = max(table.max_depth for table in tables)
        self.max_width = max(table.max_width for table in tables)
        self.register_tables(persistent=False)

    def bounds(self, kind: int) -> Tensor:
        """Begin and end of the leaves below each vector's edge: see :meth:`TreeLayout.bounds`."""
        bounds: Tensor = getattr(self, f"bounds_{kind}")
        return bounds

    def tables(self) -> dict[str, npt.NDArray[Any]]:
        trees = [layout.tree for layout in self.trees]
        out = _paths(trees)
        nodes = [layout.nodes() for layout in self.trees]
        out |= {name: _stack([tables[name] for tables in nodes]) for name in nodes[0]}
        if self.has_bounds:
            out["leaf_class"] = np.stack([tree.order.astype(np.int64) for tree in trees])
            for kind in KINDS:
                # Padding rows have a leaf too: a mean over no leaves would be NaN.
                bounds = [layout.bounds(kind) for layout in self.trees]
                out[f"bounds_{kind}"] = _stack(bounds, np.arange(bounds[0].shape[1]))
        return out

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self._buffers:
            self.rebuild()

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        super()._load_from_state_dict(*arguments, **options)
        self.rebuild()


def check_trees(trees: Sequence[Tree], n_classes: int) -> list[Tree]:
    """The trees as a list.

    Raises:
        TypeError: if they are not a list of trees.
        ValueError: unless they are trees over V classes with roots of the same width.
    """
    if isinstance(trees, Tree):
        raise TypeError("trees: expected a list of trees, got one Tree; pass [tree]")
    if not isinstance(trees, Sequence) or not all(isinstance(tree, Tree) for tree in trees):
        raise TypeError(
            f"trees: expected a list of hstree.trees.Tree, got {_what(trees)}; to build trees from "
            "class counts call TreeEnsemble.from_counts(in_features, counts), from a text "
            "from_tokens, from a trained softmax from_linear"
        )
    if not trees:
        raise ValueError("trees: expected at least one tree, got none")
    for t, tree in enumerate(trees):
        if tree.n_classes != n_classes:
            raise ValueError(f"trees[{t}]: expected {n_classes} classes, got {tree.n_classes}")
        if tree.root_width != trees[0].root_width:
            raise ValueError(
                f"trees[{t}]: expected a root of {trees[0].root_width} children as in trees[0], "
                f"got {tree.root_width}"
            )
    return list(trees)


def _what(trees: Any) -> str:
    name = type(trees).__name__
    if isinstance(trees, (list, tuple)):
        other = next(tree for tree in trees if not isinstance(tree, Tree))
        return f"a {name} with a {type(other).__name__}"
    return f"a {name}"


def _stack(tables: list[npt.NDArray[Any]], filling: Any = 0) -> npt.NDArray[Any]:
    """Tables [R, ...] of different lengths, padded and stacked to [T, R, ...]."""
    rows = max(len(table) for table in tables)
    out = np.empty((len(tables), rows, *tables[0].shape[1:]), tables[0].dtype)
    out[:] = filling
    for t, table in enumerate(tables):
        out[t, : len(table)] = table
    return out


def _paths(trees: list[Tree]) -> dict[str, npt.NDArray[Any]]:
    """The tables of :func:`hstree.ops.path_log_prob` and :func:`hstree.ops.wide_log_prob`, and the
    children of wide roots."""
    tables = [tree.tables() for tree in trees]
    out = {"leaf_position": np.stack([table.leaf_position for table in tables])}
    for path, offset in (("path", "path_offset"), ("wide_path", "wide_offset")):
        paths = [getattr(table, path) for table in tables]
        starts = np.cumsum([0, *map(len, paths[:-1])])
        out[path] = np.concatenate(paths)
        out[offset] = np.stack([getattr(table, offset) for table in tables]) + starts[:, None]
    if tables[0].root_child is not None:
        children = np.stack([np.asarray(table.root_child) for table in tables])
        beyond = np.tile(np.array([tables[0].root_width, -1], np.int32), (len(trees), 1))
        out["root_child"] = np.concatenate([children, beyond], 1)
    return out
