"""Conversion of a softmax to an ensemble of trees."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads.trees.blocks import BLOCKS
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import TreeLayout


@torch.no_grad()
def copy_softmax(head: EnsembleState, linear: nn.Linear, at: Tensor | None) -> None:
    """Set the nodes of a head with free vectors to the first-order approximation of the softmax
    about ``at`` [D]; None: 0. See :meth:`hstree.heads.TreeEnsemble.from_linear`."""
    weight = linear.weight.detach().double().cpu()
    bias = None if linear.bias is None else linear.bias.detach().double().cpu()
    origin = weight.new_zeros(weight.shape[1]) if at is None else at.detach().double().cpu()
    log_mass = F.linear(origin, weight, bias)
    for t, layout in enumerate(head.layout.trees):
        index = head.feature_index
        subset = slice(None) if index is None else index[t].long()
        of_kinds = _expansion(layout, weight[:, subset], log_mass)
        for block in head.blocks():
            vectors, biases = of_kinds[block.kind]
            block.weight[t, : len(vectors)] = vectors
            block.bias[t, : len(vectors)] = biases - vectors @ origin[subset]


def _expansion(
    layout: TreeLayout, vectors: Tensor, log_mass: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Vectors [R, S] and biases [R] of each kind of node for the first-order approximation of a
    softmax over the classes: score of a child = log sum_y m_y exp(v_y . x) over the classes y below
    it ~ log sum_y m_y + (sum_y m_y v_y / sum_y m_y) . x.

    Args:
        layout: layout of the tree.
        vectors: class vectors v [V, S], float64.
        log_mass: logarithms of the class masses m [V], float64.
    """
    tree, edges = layout.tree, layout.tree.edges()
    mass = (log_mass - log_mass.max()).clamp(min=-600.0).exp()  # none is zero
    of_edge = vectors.new_zeros(tree.n_edges, 1 + vectors.shape[1])  # mass, mass * vector
    leaf = np.flatnonzero(edges.child_node < 0)
    classes = torch.from_numpy(tree.order[edges.begin[leaf]].astype(np.int64))
    of_edge[torch.from_numpy(leaf)] = torch.cat(
        [mass[classes, None], mass[classes, None] * vectors[classes]], 1
    )
    for depth in range(int(edges.depth.max(initial=0)), 0, -1):
        here = np.flatnonzero(edges.depth == depth)
        above = torch.from_numpy(edges.parent_edge[here].astype(np.int64))
        of_edge.index_add_(0, above, of_edge[torch.from_numpy(here)])
    mean, offset = of_edge[:, 1:] / of_edge[:, :1], of_edge[:, 0].log()
    return [
        (
            block.of_edges(mean, layout.edge[block.kind]),
            block.of_edges(offset, layout.edge[block.kind]),
        )
        for block in BLOCKS
    ]
