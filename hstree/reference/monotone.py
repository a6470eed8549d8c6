"""Reference of :mod:`hstree.ops.monotone`: all log-probabilities, then the one asked for."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from hstree.reference.plif import plif_reference


def monotone_log_prob_reference(
    logits: Tensor,
    target: Tensor,
    c: float = 0.0,
    k: float = 1.0,
    table: Tensor | None = None,
    radius: float = 20.0,
) -> Tensor:
    """[R] from logits [R, V] and target [R], -1 for a row without one: 0 and no gradient."""
    rows = (target >= 0).nonzero().squeeze(1)
    x = logits[rows]
    never = x == -math.inf  # probability 0, whatever f does there
    x = x.masked_fill(never, 0.0)
    f = x + (k - 1) * F.logsigmoid(x - c) if table is None else plif_reference(x, table, radius)
    log_prob = f.masked_fill(never, -math.inf).log_softmax(1)
    chosen = log_prob.gather(1, target[rows, None]).squeeze(1)
    return logits.new_zeros(len(logits)).index_put((rows,), chosen)


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
    """[N]: logsumexp over the components of log_prior [N, K] + their log-probabilities, from latent
    [N, K, D], weight [V, D] and bias [V]; target [N], -1 for a row without one. Without log_prior
    the components are alike."""
    rows = (target >= 0).nonzero().squeeze(1)
    components = latent.shape[1]
    logits = F.linear(latent[rows], weight, bias).flatten(0, 1)
    repeated = target[rows].repeat_interleave(components)
    log_prob = monotone_log_prob_reference(logits, repeated, c, k, table, radius)
    log_prob = log_prob.view(-1, components)
    prior = -math.log(components) if log_prior is None else log_prior[rows]
    return latent.new_zeros(len(latent)).index_put((rows,), (log_prob + prior).logsumexp(1))
