"""Logarithms of sums of exponentials, with gradients of 0 where the sum is 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log_sum_exp(values: Tensor, dim: int) -> Tensor:
    """log sum exp over a dimension; -inf where all are -inf, with a gradient of 0 where that of
    :func:`torch.logsumexp` is NaN."""
    never = (values == -math.inf).all(dim)
    finite = values.masked_fill(never.unsqueeze(dim), 0.0)
    return torch.logsumexp(finite, dim).masked_fill(never, -math.inf)


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp a + exp b); -inf where both are -inf, with a gradient of 0 where that of
    :func:`torch.logaddexp` is NaN."""
    never = (a == -math.inf) & (b == -math.inf)
    a, b = a.masked_fill(never, 0.0), b.masked_fill(never, 0.0)
    return torch.logaddexp(a, b).masked_fill(never, -math.inf)
