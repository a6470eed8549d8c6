"""Leaf groups of :func:`hstree.ops.tree_log_softmax` as wide nodes with scores of their own."""

from __future__ import annotations

import torch
from torch import Tensor


def leaf_classes(node: Tensor, edge: Tensor, n_wide_rows: int, n_classes: int) -> Tensor:
    """Class of each row of the leaf groups, int64 [T, V]; 0 where a row belongs to no group."""
    block, row, first_edge, *_ = node.long().unbind(2)
    parent, below = edge.long().unbind(2)
    is_group = (block == 1) & (row >= n_wide_rows)
    first_row = (row - n_wide_rows - first_edge).gather(1, parent)
    of_group = is_group.gather(1, parent) & (below < 0)
    place = torch.arange(edge.shape[1], device=edge.device) + first_row
    classes = place.new_zeros(len(node), n_classes + 1)
    place, below = torch.where(of_group, place, n_classes), torch.where(of_group, below, -1)
    return classes.scatter(1, place, ~below)[:, :n_classes]


def with_leaf_rows(
    score: Tensor, leaf_score: Tensor, leaf_bias: Tensor, classes: Tensor, root_begin: int
) -> Tensor:
    """The scores [T, R + V, N] with those of the leaf groups after the rows of wide nodes: score
    [T, R, N], leaf_score [N, V], leaf_bias [T, V], classes of :func:`leaf_classes`."""
    parts = []
    for upper, bias, of_rows in zip(score, leaf_bias, classes, strict=True):
        rows = leaf_score.t().index_select(0, of_rows)
        rows = rows + bias.index_select(0, of_rows).unsqueeze(1)
        parts += [upper[:root_begin], rows, upper[root_begin:]]
    return torch.cat(parts).view(len(score), score.shape[1] + classes.shape[1], score.shape[2])


def without_leaf_rows(
    grad: Tensor, classes: Tensor, root_begin: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of score, leaf_score and leaf_bias from that of :func:`with_leaf_rows`. Tree by
    tree, so that the order of the sums is fixed."""
    n_classes = classes.shape[1]
    root = grad[:, root_begin + n_classes :]
    upper, leaves = grad[:, :root_begin], grad[:, root_begin : root_begin + n_classes]
    zeros = grad.new_zeros(n_classes, grad.shape[2])
    grad_leaf_score = zeros
    for of_rows, rows in zip(classes, leaves, strict=True):
        grad_leaf_score = grad_leaf_score.index_add(0, of_rows, rows)
    sums = leaves.sum(2)
    grad_leaf_bias = torch.zeros_like(sums).scatter_add(1, classes, sums)
    return torch.cat([upper, root], 1), grad_leaf_score.t(), grad_leaf_bias
