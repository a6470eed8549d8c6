"""Reference of :mod:`hstree.ops.target_log_softmax`: all log-probabilities, then that of the
target."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

from reference.piecewise import piecewise_reference


def target_log_softmax_reference(
    logits: Tensor,
    target: Tensor,
    c: float = 0.0,
    k: float = 1.0,
    table: Tensor | None = None,
    radius: float = 20.0,
) -> Tensor:
    """log_prob [R] from logits [R, V] and target [R], -1 for an ignored row: 0 and no gradient."""
    rows = (target >= 0).nonzero().squeeze(1)
    x = logits[rows]
    never = x == -math.inf  # probability 0 for any f
    x = x.masked_fill(never, 0.0)
    f = (
        x + (k - 1) * F.logsigmoid(x - c)
        if table is None
        else piecewise_reference(x, table, radius)
    )
    log_prob = f.masked_fill(never, -math.inf).log_softmax(1)
    chosen = log_prob.gather(1, target[rows, None]).squeeze(1)
    return logits.new_zeros(len(logits)).index_put((rows,), chosen)
