"""Reference of :mod:`hstree.ops.sparse_adam`: gathers, updates and writes the visited rows."""

import torch
from torch import Tensor


def sparse_adam_reference(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    index: Tensor,
    values: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> None:
    """Updates weight, exp_avg and exp_avg_sq in place; arguments of
    :func:`hstree.ops.sparse_adam_`."""
    rows = tuple(index)
    g = values.to(exp_avg.dtype) * (-1 if maximize else 1)
    m = exp_avg[rows] * beta1 + g * (1 - beta1)
    v = exp_avg_sq[rows] * beta2 + g * g * (1 - beta2)
    denominator = torch.sqrt(v / (1 - beta2**step)) + eps
    w = (1 - lr * weight_decay) * weight[rows].to(exp_avg.dtype)
    w = w - lr / (1 - beta1**step) * m / denominator
    exp_avg[rows], exp_avg_sq[rows], weight[rows] = m, v, w.to(weight.dtype)
