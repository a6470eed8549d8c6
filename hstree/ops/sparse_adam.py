"""AdamW in the rows that a row-sparse gradient visits: ``torch.ops.hstree.sparse_adam_``."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_adam_(
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
    """One step of lazy AdamW, in place in the visited rows of the weight and its moments.

    Rows that are not visited do not change. For the visited rows::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        w <- (1 - lr weight_decay) w
             - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)

    This is the rule of :class:`torch.optim.AdamW`, in one pass over the rows.
    :class:`hstree.optim.AdamW` is the optimizer that calls this function.

    Deterministic. Computed in float32 (float64 for float64); the weight is rounded once. Not
    differentiable.

    Args:
        weight: parameter, w, contiguous: float32, float64, bfloat16 or float16. Its first one or
            two dimensions index the rows.
        exp_avg: first moment, m, contiguous, shape of ``weight``: float32, or float64 for float64.
        exp_avg_sq: second moment, v, shape and dtype of ``exp_avg``.
        index: indices of the visited rows, strictly increasing, [1, nnz] or [2, nnz] int64.
        values: gradient of each visited row, g [nnz, ...], dtype of ``weight``.
        step: number of this step, counted from 1.
        lr: learning rate.
        beta1: decay of m, in [0, 1).
        beta2: decay of v, in [0, 1).
        eps: number added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: whether to maximize instead of minimizing.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number. On the CPU also for an index that
            is out of range or does not increase, before anything is written. On CUDA a row out of
            range is ignored, and the result for repeated rows is undefined.

    Example:
        >>> import torch
        >>> from hstree.ops import sparse_adam_
        >>> weight, m, v = torch.ones(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> index, values = torch.tensor([[1]]), torch.tensor([[4.0, -4.0]])
        >>> rule = dict(step=1, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8)
        >>> sparse_adam_(weight, m, v, index, values, **rule)
        >>> weight
        tensor([[1.0000, 1.0000],
                [0.5000, 1.5000],
                [1.0000, 1.0000]])

    Source: Kingma and Ba, Adam: a method for stochastic optimization, ICLR 2015, algorithm 1;
    Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019, algorithm 2.
    """
    changed = weight, exp_avg, exp_avg_sq
    numbers = step, lr, beta1, beta2, eps, weight_decay, maximize
    torch.ops.hstree.sparse_adam_(*changed, index, values, *numbers)
    torch.autograd.graph.increment_version(changed)


torch.library.register_fake("hstree::sparse_adam_", lambda *_: None)
