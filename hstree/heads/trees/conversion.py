"""Nodes from the scores of the classes: conversion of a softmax to an ensemble of trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from hstree.heads.buffers import fill
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import TreeLayout
from hstree.heads.trees.vectors import NODE_BLOCKS

if TYPE_CHECKING:
    from hstree.heads.softmax import Softmax


@torch.no_grad()
def copy_softmax(head: EnsembleState, linear: nn.Linear | Softmax, at: Tensor | None) -> None:
    """Set a head to the first-order approximation of the softmax about ``at`` [D]; None: 0. See
    :meth:`hstree.heads.TreeEnsemble.from_linear`."""
    bias = linear.weight.new_zeros(head.n_classes) if linear.bias is None else linear.bias.detach()
    if head.node_vectors == "leaves":
        if not head.tied:
            fill(head.output_embedding, linear.weight.detach())
        if head.leaf_bias is not None:
            fill(head.leaf_bias, bias.expand_as(head.leaf_bias))
    expand_nodes(head, linear.weight, bias.double().cpu().expand(head.n_trees, -1), at)


@torch.no_grad()
def expand_nodes(head: EnsembleState, weight: Tensor, bias: Tensor, at: Tensor | None) -> None:
    """Set the nodes that have vectors of their own to the first-order expansion of the scores
    E_y . h + b_ty about ``at`` [D]; None: 0.

    Args:
        head: an ensemble whose nodes have free vectors, or free ones above the leaf groups.
        weight: class vectors E [V, D].
        bias: class biases b [T, V], float64 on the CPU.
        at: h_0 [D].
    """
    weight = weight.detach().double().cpu()
    origin = weight.new_zeros(weight.shape[1]) if at is None else at.detach().double().cpu()
    scores = weight @ origin
    for t, layout in enumerate(head.layout.trees):
        index = head.feature_index
        subset = slice(None) if index is None else index[t].long().cpu()
        mean, log_mass = _expansion(layout, weight[:, subset], scores + bias[t])
        for block in NODE_BLOCKS:
            edge = layout.edge[block.kind]
            if not len(edge):
                continue
            own_weight: Tensor | None = getattr(head, block.weight_name)
            own_bias: Tensor = getattr(head, f"{block.prefix}bias")
            vectors, offset = block.of_edges(mean, edge), block.of_edges(log_mass, edge)
            own_bias[t, : len(edge)] = (offset - vectors @ origin[subset]).to(own_bias)
            if own_weight is not None:
                own_weight[t, : len(edge)] = vectors.to(own_weight)
    if head.node_vectors == "leaves" and head.root_weight is not None:
        head.root_weight.flatten(0, 1)[head.layout.root_row] = 0.0  # they read E


def _expansion(layout: TreeLayout, vectors: Tensor, log_mass: Tensor) -> tuple[Tensor, Tensor]:
    """Mean vector [E, S] and log-mass [E] of the classes below each edge. To first order they are
    the score of a child: log sum_y m_y exp(v_y . x) over the classes y below it ~ log sum_y m_y +
    (sum_y m_y v_y / sum_y m_y) . x.

    Args:
        layout: layout of the tree.
        vectors: class vectors v [V, S], float64.
        log_mass: logarithms of the class masses m [V], float64.
    """
    tree, edges = layout.tree, layout.tree.edges()
    largest = log_mass.max()
    mass = (log_mass - largest).clamp(min=-600.0).exp()  # none is zero
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
    return of_edge[:, 1:] / of_edge[:, :1], of_edge[:, 0].log() + largest
