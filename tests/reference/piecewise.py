"""Reference of :mod:`hstree.ops.piecewise`: the interval of each element by gather."""

import torch
from torch import Tensor

from hstree._numerics import sum_dtype


def piecewise_reference(input: Tensor, table: Tensor, radius: float) -> Tensor:
    """f(input), shape and dtype of input; table [K, 2] or [K, 4]. Computed in float32 (float64 for
    float64 input); differentiable in input and table."""
    dtype = sum_dtype(input.dtype)
    intervals, width = table.shape
    scaled = input.to(dtype) * (intervals / (2 * radius))
    j = (scaled.detach() + intervals / 2).floor().nan_to_num(0.0).clamp(0, intervals - 1)
    u = scaled + (intervals / 2 - j)  # beyond [0, 1] outside [-radius, radius]
    inside = u.clamp(0, 1)
    coefficient = table.to(dtype)[j.long()].unbind(-1)
    value, slope = coefficient[width - 1], torch.zeros_like(u)
    for a in reversed(coefficient[: width - 1]):
        value, slope = value * inside + a, slope * inside + value
    return (value + slope * (u - inside)).to(input.dtype)
