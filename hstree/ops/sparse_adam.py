"""AdamW in the rows that a row-sparse gradient visits: ``torch.ops.hstree.sparse_adam_``."""

from __future__ import annotations

import torch
from torch import Tensor

from hstree.ops._autograd import refuse_transforms


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
    """One step of lazy AdamW, in place in the visited rows of the weight and its moments; every
    other row stays as it is::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        w <- (1 - lr weight_decay) w
             - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)

    The rule of :class:`torch.optim.AdamW` for these rows, in one pass over them; see
    :func:`hstree.reference.sparse_adam_reference` for an equivalent in PyTorch.
    :class:`hstree.optim.AdamW` is the optimiser.

    Args:
        weight: w, contiguous: float32, float64, bfloat16 or float16. Its first one or two
            dimensions count the rows.
        exp_avg: m, contiguous, shape of ``weight``: float32, or float64 for float64.
        exp_avg_sq: v, likewise.
        index: [1, nnz] or [2, nnz] int64, places of the visited rows, strictly increasing.
        values: g [nnz, ...], the gradient of each visited row, dtype of ``weight``.
        step: number of this step, counted from 1.
        lr: learning rate.
        beta1: decay of m, in [0, 1).
        beta2: decay of v, in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead.

    Raises:
        RuntimeError: for a shape, dtype, device or number that does not fit; on the CPU also for an
            index that is out of range or does not increase, before anything is written. On CUDA a
            row out of range is left out, and the result of rows that come twice is undefined.

    Deterministic. Computed in float32 (float64 for float64); the weight is rounded once.
    Not differentiable.

    Example:
        >>> weight, m, v = torch.ones(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
        >>> index, values = torch.tensor([[1]]), torch.tensor([[4.0, -4.0]])
        >>> rule = dict(step=1, lr=0.5, beta1=0.9, beta2=0.999, eps=1e-8)
        >>> sparse_adam_(weight, m, v, index, values, **rule)
        >>> weight
        tensor([[1.0000, 1.0000],
                [0.5000, 1.5000],
                [1.0000, 1.0000]])

    Kingma and Ba, Adam: A method for stochastic optimization (ICLR 2015), algorithm 1; Loshchilov
    and Hutter, Decoupled weight decay regularization (ICLR 2019), algorithm 2.
    """
    torch.ops.hstree.sparse_adam_(
        weight,
        exp_avg,
        exp_avg_sq,
        index,
        values,
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        maximize,
    )
    torch.autograd.graph.increment_version((weight, exp_avg, exp_avg_sq))


torch.library.register_fake("hstree::sparse_adam_", lambda *_: None)
refuse_transforms("sparse_adam_")
