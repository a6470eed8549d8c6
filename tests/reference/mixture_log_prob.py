"""Reference of :mod:`hstree.ops.mixture_log_prob`: all logits at once."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from reference.target_log_softmax import target_log_softmax_reference


def mixture_log_prob_reference(
    latent: Tensor,
    log_prior: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    c: float = 0.0,
    k: float = 1.0,
    table: Tensor | None = None,
    radius: float = 20.0,
) -> Tensor:
    """log_prob [N]: logsumexp over the components of log_prior [N, K] + their log-probabilities.

    The latter are computed from latent [N, K, D], weight [V, D] and bias [V]. target is [N], -1 for
    an ignored row. Without log_prior all components have the same prior."""
    rows = (target >= 0).nonzero().squeeze(1)
    components = latent.shape[1]
    logits = F.linear(latent[rows], weight, bias).flatten(0, 1)
    repeated = target[rows].repeat_interleave(components)
    log_prob = target_log_softmax_reference(logits, repeated, c, k, table, radius)
    log_prob = log_prob.view(-1, components)
    prior = -math.log(components) if log_prior is None else log_prior[rows]
    return latent.new_zeros(len(latent)).index_put((rows,), (log_prob + prior).logsumexp(1))
