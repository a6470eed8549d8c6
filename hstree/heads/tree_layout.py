"""Where the nodes of an ensemble of trees keep their weights, as arrays that the head computes
with.

Every tree has three blocks of weight rows: one row for each binary node, one for each child of a
wide node other than the root, and one for each child of a wide root. All trees share one shape, so
blocks are padded to the largest tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.trees import Tree

IntArray = npt.NDArray[np.int64]


class TreeLayout:
    """Weight rows of one tree.

    Attributes:
        n_binary, n_wide_rows, root_width: rows of the three blocks.
        block, row: int64 [E], block (0 binary, 1 wide, 2 root) and row in it of every edge of the
            tree.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        edges = tree.edges()
        children = np.diff(tree.node_offset) - 1
        binary = children == 2
        wide = ~binary
        self.root_width = tree.tables().root_width
        if self.root_width:
            wide[0] = False
        self.n_binary = int(binary.sum())
        self.n_wide_rows = int(children[wide].sum())
        first = np.where(
            binary, np.cumsum(binary) - 1, np.cumsum(children * wide) - children * wide
        )
        self.block: IntArray = np.where(binary, 0, 1)[edges.node].astype(np.int64)
        self.row: IntArray = first[edges.node] + np.where(binary[edges.node], 0, edges.ordinal)
        if self.root_width:
            at_root = edges.node == 0
            self.block[at_root] = 2
            self.row[at_root] = edges.ordinal[at_root]

    def log_odds(self, frequencies: npt.NDArray[np.float64]) -> list[npt.NDArray[np.float64]]:
        """Bias of every row in each block, with which zero weights give the distribution of the
        frequencies.

        log(mass of the left subtree / mass of the right one) for a binary node, log(mass of the
        child / mass of the node) for a child of a wide one.
        """
        mass = np.log(self.tree.edge_masses(frequencies))
        sizes = (self.n_binary, self.n_wide_rows, self.root_width)
        out = [np.zeros(size) for size in sizes]
        left = np.flatnonzero((self.block == 0) & (self.tree.edges().ordinal == 0))
        out[0][self.row[left]] = mass[left] - mass[left + 1]
        node = self.tree.edges().node
        total = np.log(np.bincount(node, np.exp(mass), self.tree.n_nodes))
        for b in (1, 2):
            of = self.block == b
            out[b][self.row[of]] = mass[of] - total[node[of]]
        return out

    def expansion(self, vectors: Tensor, log_mass: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Vector and bias of every row in each block, with which a node decides as a softmax over
        the classes does to first order in x: score of a child = log sum_y m_y exp(v_y . x) over the
        classes y below it ~ log sum_y m_y + (sum_y m_y v_y / sum_y m_y) . x.

        Args:
            vectors: v [V, S], float64.
            log_mass: log m [V], float64.

        Returns:
            vectors [rows, S] and biases [rows] of the binary nodes (of the left child less those of
            the right one), the children of wide nodes and of a wide root.
        """
        edges = self.tree.edges()
        mass = (log_mass - log_mass.max()).clamp(min=-600.0).exp()  # none is zero
        of_edge = vectors.new_zeros(len(edges.node), 1 + vectors.shape[1])  # mass, mass * vector
        leaf = np.flatnonzero(edges.child_node < 0)
        classes = torch.from_numpy(self.tree.order[edges.begin[leaf]].astype(np.int64))
        of_edge[torch.from_numpy(leaf)] = torch.cat(
            [mass[classes, None], mass[classes, None] * vectors[classes]], 1
        )
        for depth in range(int(edges.depth.max(initial=0)), 0, -1):
            here = np.flatnonzero(edges.depth == depth)
            above = torch.from_numpy(edges.parent_edge[here].astype(np.int64))
            of_edge.index_add_(0, above, of_edge[torch.from_numpy(here)])
        mean, offset = of_edge[:, 1:] / of_edge[:, :1], of_edge[:, 0].log()
        out = []
        for block, rows in enumerate((self.n_binary, self.n_wide_rows, self.root_width)):
            of = np.flatnonzero((self.block == block) & ((block > 0) | (edges.ordinal == 0)))
            place, row = torch.from_numpy(of), torch.from_numpy(self.row[of])
            vector, bias = vectors.new_zeros(rows, vectors.shape[1]), vectors.new_zeros(rows)
            vector[row], bias[row] = mean[place], offset[place]
            if block == 0:
                vector[row] -= mean[place + 1]
                bias[row] -= offset[place + 1]
            out.append((vector, bias))
        return out

    def node_tables(self) -> dict[str, npt.NDArray[np.int32]]:
        """node [M, 5], edge [E, 2] and leaf_edge [V], as :func:`hstree.ops.tree_topk` and
        :func:`hstree.ops.tree_log_prob` take them of one tree."""
        edges = self.tree.edges()
        first_edge = self.tree.node_offset[:-1] - np.arange(self.tree.n_nodes)
        below = np.flatnonzero(edges.child_node >= 0)
        above = np.full(self.tree.n_nodes, -1)
        above[edges.child_node[below]] = below
        leaf = np.flatnonzero(edges.child_node < 0)
        classes = self.tree.order[edges.begin[leaf]]
        child = edges.child_node.copy()
        child[leaf] = ~classes
        leaf_edge = np.full(self.tree.n_classes, -1)
        leaf_edge[classes] = leaf
        width = np.diff(self.tree.node_offset) - 1
        node = [self.block[first_edge], self.row[first_edge], first_edge, width, above]
        tables = {
            "node": np.stack(node, 1),
            "edge": np.stack([edges.node, child], 1),
            "leaf_edge": leaf_edge,
        }
        return {name: table.astype(np.int32) for name, table in tables.items()}


def stack_node_tables(layouts: Sequence[TreeLayout]) -> dict[str, Tensor]:
    """Tables of all trees as :func:`hstree.ops.tree_topk` and :func:`hstree.ops.tree_log_prob`
    take them, filled up with zeros."""
    tables = [layout.node_tables() for layout in layouts]
    stacked = {}
    for name, first in tables[0].items():
        rows = max(len(table[name]) for table in tables)
        array = np.zeros((len(tables), rows, *first.shape[1:]), np.int32)
        for t, table in enumerate(tables):
            array[t, : len(table[name])] = table[name]
        stacked[name] = torch.from_numpy(array)
    return stacked


def stack_tables(trees: Sequence[Tree]) -> tuple[dict[str, Tensor], int, int]:
    """Tables of all trees as the ops take them, and the largest max_depth and max_width."""
    tables = [tree.tables() for tree in trees]
    starts = np.cumsum([0] + [len(t.path) for t in tables])
    wide_starts = np.cumsum([0] + [len(t.wide_path) for t in tables])
    arrays = {
        "path_offset": np.stack([t.path_offset + s for t, s in zip(tables, starts, strict=False)]),
        "path": np.concatenate([t.path for t in tables]),
        "wide_offset": np.stack(
            [t.wide_offset + s for t, s in zip(tables, wide_starts, strict=False)]
        ),
        "wide_path": np.concatenate([t.wide_path for t in tables]),
        "leaf_position": np.stack([t.leaf_position for t in tables]),
    }
    if tables[0].root_child is not None:
        arrays["root_child"] = np.stack([t.root_child for t in tables if t.root_child is not None])
    stacked = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return stacked, max(t.max_depth for t in tables), max(t.max_width for t in tables)
