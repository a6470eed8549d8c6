"""Reference of :mod:`hstree.ops.candidate_log_prob`: from the log-probabilities of all classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.tree_log_softmax import tree_log_softmax_reference


def candidate_log_prob_reference(
    *vectors: Any, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities [N, K]; arguments of :func:`hstree.ops.candidate_log_prob`."""
    log_prob = all_log_probs(*vectors, temperature=temperature)
    return log_prob.gather(1, candidates.clamp(min=0)).masked_fill(candidates == -1, 0.0)


class Scores(NamedTuple):
    """Scores [T, R, N] of all nodes after the temperature, and the first rows of the second and
    third block; see :func:`hstree.ops.tree_log_softmax`."""

    score: Tensor
    wide_begin: int
    root_begin: int


def all_log_probs(*vectors: Any, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N, V] of all classes; arguments of
    :func:`hstree.ops.candidate_log_prob`."""
    log_gate, _, node, edge, leaf_edge = vectors[8:13]
    score, wide_begin, root_begin = all_scores(*vectors, temperature=temperature)
    return tree_log_softmax_reference(
        score, log_gate, node, edge, leaf_edge.shape[1], wide_begin, root_begin
    )


def all_scores(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wide_weight: Tensor | None,
    wide_bias: Tensor | None,
    leaf_weight: Tensor | None,
    leaf_bias: Tensor | None,
    root_log_prob: Tensor | None,
    log_gate: Tensor,
    feature_index: Tensor | None,
    node: Tensor,
    edge: Tensor,
    leaf_edge: Tensor,
    *,
    temperature: float = 1.0,
) -> Scores:
    dtype = log_gate.dtype
    trees = log_gate.shape[1]
    x = hidden.to(dtype).expand(trees, -1, -1)
    if feature_index is not None:
        x = torch.stack([x[t][:, feature_index[t].long()] for t in range(trees)])

    def scores(weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if weight is None:
            return x.new_zeros(trees, 0, len(hidden))
        z = weight.to(dtype) @ x.mT
        return z if bias is None else z + bias.to(dtype).unsqueeze(2)

    binary, wide = scores(weight, bias), scores(wide_weight, wide_bias)
    if leaf_weight is not None:
        # A leaf group has a row for each class, in the order of its edges.
        score = leaf_weight.to(dtype) @ hidden.to(dtype).t()
        leaf = x.new_zeros(trees, leaf_edge.shape[1], len(hidden))
        for t in range(trees):
            for block, row, first_edge, width, _ in node[t].tolist():
                if block == 1 and row >= wide.shape[1]:
                    classes = ~edge[t, first_edge : first_edge + width, 1].long()
                    rows = slice(row - wide.shape[1], row - wide.shape[1] + width)
                    leaf[t, rows] = score[classes]
                    if leaf_bias is not None:
                        leaf[t, rows] += leaf_bias[t, classes].to(dtype).unsqueeze(1)
        wide = torch.cat([wide, leaf], 1)
    root = x.new_zeros(trees, 0, len(hidden)) if root_log_prob is None else root_log_prob.mT
    below = torch.cat([binary, wide], 1) / temperature
    return Scores(torch.cat([below, root], 1), binary.shape[1], below.shape[1])
