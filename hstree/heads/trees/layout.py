"""The tables of all trees of an ensemble for the ops.

All trees share tensors of one shape, padded to the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.buffers import Tables
from hstree.heads.trees.paths import path_tables, stacked, stacked_paths
from hstree.heads.trees.tree_layout import KINDS, LEAF, ROOT, WIDE, TreeLayout
from hstree.trees import Tree

BUILD_TREES = (
    "to build trees from class counts call TreeEnsemble.from_counts(in_features, counts), from a "
    "text from_tokens, from a trained softmax from_linear; the number of trees is their n_trees"
)


class Layout(Tables):
    """Tables of T trees, which are not saved.

    Args:
        trees: T trees over V classes, with roots of the same width.
        n_classes: number of classes, V.
        leaf_groups: whether leaf groups are a kind of their own, with ``leaf_class`` and the tables
            of :func:`hstree.ops.leaf_log_prob`.

    Raises:
        ValueError: for no tree, or trees of different sizes or root widths.

    Attributes:
        trees: layout of each tree.
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

    def __init__(self, trees: Sequence[Tree], n_classes: int, *, leaf_groups: bool = False) -> None:
        super().__init__()
        check_trees(trees, n_classes)
        self.trees = [TreeLayout(tree, leaf_groups=leaf_groups) for tree in trees]
        self.has_groups = leaf_groups
        self.n_rows = [max(len(tree.edge[kind]) for tree in self.trees) for kind in KINDS]
        if self.n_rows[LEAF]:
            self.n_rows[LEAF] = n_classes
        paths = [path_tables(tree) for tree in self.trees]
        self.max_depth = max(table.max_depth for table in paths)
        self.max_width = max(table.max_width for table in paths)
        self.max_group = max(tree.widest_group for tree in self.trees)
        last = sum(tree.n_last_nodes for tree in self.trees)
        self.mean_group = n_classes * len(self.trees) / max(last, 1)
        self.set_tables()

    def tables(self) -> dict[str, Tensor]:
        return {name: torch.tensor(table, device="cpu") for name, table in self._arrays().items()}

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        out = stacked_paths([path_tables(tree) for tree in self.trees])
        nodes = [layout.nodes(self.n_rows[WIDE]) for layout in self.trees]
        out |= {name: _stack([tables[name] for tables in nodes]) for name in nodes[0]}
        if self.has_groups:
            out["leaf_class"] = np.stack([layout.tree.order for layout in self.trees])
            out |= stacked([layout.groups() for layout in self.trees], "group", "group_offset")
            rows, classes = zip(*(layout.root_classes() for layout in self.trees), strict=True)
            place = [t * self.n_rows[ROOT] + row for t, row in enumerate(rows)]
            out["root_row"] = np.concatenate(place).astype(np.int64)
            out["root_class"] = np.concatenate(classes).astype(np.int64)
        return out


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
            f"trees: expected a list of hstree.trees.Tree, got {_what(trees)}; {BUILD_TREES}"
        )
    if not trees:
        raise ValueError(f"trees: expected at least one tree, got none; {BUILD_TREES}")
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


def _stack(tables: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Tables [R, ...] of different lengths, padded with zeros and stacked to [T, R, ...]."""
    rows = max(len(table) for table in tables)
    out = np.zeros((len(tables), rows, *tables[0].shape[1:]), tables[0].dtype)
    for t, table in enumerate(tables):
        out[t, : len(table)] = table
    return out
