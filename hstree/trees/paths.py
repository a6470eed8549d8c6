"""Paths of many classes at once, and their lowest common ancestors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hstree.trees.tables import Int32Array, Int64Array
from hstree.trees.tree import Tree


def edge_paths(tree: Tree, classes: npt.ArrayLike) -> Int32Array:
    """The edges on the paths of classes, root first: int32 [n, ``tree.height``], -1 below the leaf.

    Args:
        tree: the tree.
        classes: classes, int [n], in [0, V).

    Example:
        >>> from hstree.trees import Tree
        >>> from hstree.trees.paths import edge_paths
        >>> tree = Tree.from_nested((2, (0, 1)))
        >>> edge_paths(tree, [2, 1]).tolist()  # edges 0, 1 of the root; 2, 3 of the node below
        [[0, -1], [1, 3]]
    """
    wanted: Int64Array = np.asarray(classes, dtype=np.int64)
    edges = tree.edges()
    leaf = np.flatnonzero(edges.child_node < 0)
    edge_of_class = np.empty(tree.n_classes, np.int64)
    edge_of_class[tree.order[edges.begin[leaf]]] = leaf
    paths = np.full((len(wanted), tree.height), -1, np.int32)
    if not tree.n_nodes:
        return paths
    edge = edge_of_class[wanted]
    row = np.arange(len(wanted))
    # All paths at once, one edge up in each turn, until the longest has come to the root.
    while len(row):
        paths[row, edges.depth[edge]] = edge
        edge = edges.parent_edge[edge].astype(np.int64)
        row, edge = row[edge >= 0], edge[edge >= 0]
    return paths


def common_depth(tree: Tree, first: npt.ArrayLike, second: npt.ArrayLike) -> Int64Array:
    """Depth of the lowest common ancestor of pairs of classes, int64 [n].

    0 if the ancestor is the root. For a class and itself, the number of inner nodes on its path.

    Args:
        tree: the tree.
        first: first classes of the pairs, int [n], in [0, V).
        second: second classes of the pairs, int [n], in [0, V).
    """
    a, b = edge_paths(tree, first), edge_paths(tree, second)
    # Once an edge differs, so do all edges below it.
    return np.asarray(((a == b) & (a >= 0)).sum(axis=1), dtype=np.int64)
