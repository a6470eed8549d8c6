"""Trees with more or fewer classes, and which of their edges are those of the old tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.heads.trees.tree_layout import IntArray
from hstree.trees import Tree

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ChangedTree:
    """A tree made from an old one.

    Attributes:
        tree: the tree.
        edge: for each edge, the edge of the old tree that its score was learned for, or -1, [E].
        log_share: what is added to that score, [E].
    """

    tree: Tree
    edge: IntArray
    log_share: FloatArray


def grown(tree: Tree, subtrees: Sequence[Tree]) -> ChangedTree:
    """The tree with more classes: its leaves keep their order, and all its nodes stay.

    The subtrees, each over new classes from 0 on, become further children of the root, from left to
    right. Beside a binary root over inner nodes they become its sibling, below a new root: there is
    one of them.
    """
    old = tree.n_classes
    ends = old + np.cumsum([subtree.n_classes for subtree in subtrees])
    starts = np.append(old, ends[:-1])
    at_root = tree.root_width != 2 or tree.n_nodes == 1
    bounds = np.split(tree.boundary, tree.node_offset[1:-1])
    edges = [np.arange(tree.n_edges), np.full(sum(s.n_edges for s in subtrees), -1)]
    if at_root:
        root = bounds[0] if tree.n_nodes else np.array([0, 1])
        bounds[:1] = [np.append(root, ends)]
        width = max(tree.root_width, 1)  # of one class: an edge without a score
        kept = np.arange(width) if tree.n_nodes else np.full(1, -1)
        edges[0] = np.concatenate([kept, np.full(len(subtrees), -1), edges[0][width:]])
    else:
        bounds.insert(0, np.array([0, old, ends[-1]]))
        edges.insert(0, np.full(2, -1))
    for subtree, start in zip(subtrees, starts, strict=True):
        if subtree.n_nodes:
            bounds += np.split(subtree.boundary + start, subtree.node_offset[1:-1])
    order = [tree.order, *(s.order + start for s, start in zip(subtrees, starts, strict=True))]
    edge = np.concatenate(edges)
    return ChangedTree(_tree(np.concatenate(order), bounds), edge, np.zeros(len(edge)))


def pruned(tree: Tree, n_classes: int) -> ChangedTree:
    """The tree of the classes below ``n_classes``. A node with one child left is replaced by it."""
    kept = tree.order < n_classes
    begin = np.append(0, np.cumsum(kept))
    bounds, edges = [], [np.empty(0, np.int64)]
    for m, node in enumerate(np.split(tree.boundary, tree.node_offset[1:-1])):
        position = begin[node] if tree.n_nodes else np.zeros(1)
        alive = np.diff(position) > 0
        if alive.sum() > 1:
            bounds.append(np.append(position[0], position[1:][alive]))
            edges.append(tree.node_offset[m] - m + np.flatnonzero(alive))
    edge = np.concatenate(edges)
    return ChangedTree(_tree(tree.order[kept], bounds), edge, np.zeros(len(edge)))


def widened(changed: ChangedTree, width: int, bias: FloatArray) -> ChangedTree:
    """The tree with a root of this width: the last children of the smallest nodes below the root
    move up to it, with the share that they have where all scores are ``bias``, those of the edges
    of the old tree."""
    tree, edge, share = changed.tree, changed.edge, changed.log_share
    while tree.n_nodes and tree.root_width < width:
        edges = tree.edges()
        of_root = slice(tree.root_width)
        size = (edges.end - edges.begin)[of_root]
        above = int(np.argmin(np.where(edges.child_node[of_root] >= 0, size, tree.n_classes)))
        node = int(edges.child_node[above])
        first, end = (int(tree.node_offset[m]) - m for m in (node, node + 1))
        score = bias[edge[first:end]] + share[first:end]
        log_share = score - np.logaddexp.reduce(score)
        bounds = np.split(tree.boundary, tree.node_offset[1:-1])
        bounds[0] = np.insert(bounds[0], above + 1, bounds[node][-2])
        bounds[node] = bounds[node][:-1]
        gone = [end - 1]
        if len(bounds[node]) == 2:
            del bounds[node]
            gone.append(first)
        share = np.insert(np.delete(share, gone), above + 1, share[above] + log_share[-1])
        share[above] += np.logaddexp.reduce(log_share[:-1])
        edge = np.insert(np.delete(edge, gone), above + 1, edge[above])
        tree = _tree(tree.order, bounds)
    return ChangedTree(tree, edge, share)


def subtrees_like(trees: Sequence[Tree], added: int) -> list[Tree]:
    """Trees over ``added`` classes in all, of the shape that the trees have below their roots."""
    height = max(tree.height for tree in trees)
    if height <= 1:
        return [Tree.from_nested(0)] * added
    widest, inner_wide = 2, False
    for tree in trees:
        edges = tree.edges()
        above_inner = np.zeros(tree.n_nodes, bool)
        above_inner[edges.node[edges.child_node >= 0]] = True
        widest = max(widest, int(tree.n_children[~above_inner].max(initial=0)))
        inner_wide |= bool((tree.n_children[1:][above_inner[1:]] > 2).any())
    groups = [list(part) for part in np.array_split(np.arange(added), -(-added // widest))]
    binary_root = trees[0].root_width == 2
    if height == 2 and not binary_root:
        if added <= 2:
            groups = [[c] for c in range(added)]
        return [_nested_tree([list(range(len(group)))]) for group in groups]
    return [_nested_tree(groups, wide=inner_wide)]


def _nested_tree(groups: Sequence[Sequence[int]], wide: bool = False) -> Tree:
    """A tree over groups of classes: one node with all of them as its children, or a balanced
    binary tree."""
    parts: list[Any] = [tuple(map(int, g)) if len(g) > 1 else int(g[0]) for g in groups]
    if wide and len(parts) > 1:
        return Tree.from_nested(tuple(parts))

    def halved(parts: list[Any]) -> Any:
        middle = (len(parts) + 1) // 2
        return parts[0] if len(parts) == 1 else (halved(parts[:middle]), halved(parts[middle:]))

    return Tree.from_nested(halved(parts))


def _tree(order: npt.NDArray[Any], bounds: Sequence[npt.NDArray[Any]]) -> Tree:
    """The tree with the boundaries of each node."""
    offset = np.append(0, np.cumsum([len(node) for node in bounds])).astype(np.int64)
    boundary = np.concatenate([np.empty(0, np.int32), *bounds])
    return Tree(order.astype(np.int32), offset, boundary.astype(np.int32))
