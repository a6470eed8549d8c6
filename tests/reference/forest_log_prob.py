"""Reference of :mod:`hstree.ops.forest_log_prob`: all scores of all trees at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def forest_log_prob_reference(
    hidden: Tensor,
    log_prior: Tensor,
    cluster_score: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cluster: Tensor,
    target: Tensor,
    offset: Tensor | None = None,
) -> Tensor:
    """log_prob [N] = log sum_t pi_t softmax(W h + b + r_t[c_t])_y; target -1 marks an ignored row.
    The offset is added to the scores of all classes but the target.

    Shapes: hidden [N, D], log_prior [N, T], cluster_score [N, T, C], weight [V, D], bias [V],
    cluster [V, T], target [N], offset [V]."""
    rows = (target >= 0).nonzero().squeeze(1)
    score = F.linear(hidden[rows], weight, bias)
    if offset is not None:
        others = torch.arange(len(weight), device=target.device) != target[rows, None]
        score = score + offset.where(others, 0.0)
    by_tree = [
        (score + cluster_score[rows, t][:, cluster[:, t].long()]).log_softmax(1)
        for t in range(cluster.shape[1])
    ]
    chosen = torch.stack(by_tree, 1).gather(
        2, target[rows, None, None].expand(-1, cluster.shape[1], 1)
    )
    log_prob = (log_prior[rows] + chosen.squeeze(2)).logsumexp(1)
    return hidden.new_zeros(len(hidden)).index_put((rows,), log_prob)
