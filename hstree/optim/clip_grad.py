"""Clipping of dense and row-sparse gradients by their joint norm."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from hstree.optim.rows import summed_rows


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """:func:`torch.nn.utils.clip_grad_norm_` that takes row-sparse gradients too: scales all
    gradients, in place, so that the norm of all of them together is at most ``max_norm``.

    Rows that come more than once in a sparse gradient are added up first; the gradient then counts
    as its dense form would.

    Args:
        parameters: parameters, or one; those without a gradient do not count.
        max_norm: largest norm.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: raise for a norm that is not finite, before anything is scaled.
        foreach: as in torch, for the dense gradients.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> embedding = torch.nn.Embedding(5, 2, sparse=True)
        >>> embedding(torch.tensor([1, 3, 1])).sum().backward()
        >>> clip_grad_norm_(embedding.parameters(), 1.0)  # of the gradients (2, 2) and (1, 1)
        tensor(3.1623)
        >>> round(float(embedding.weight.grad.to_dense().norm()), 4)
        1.0
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    dense, rows = [], []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if not parameter.grad.is_sparse:
            dense.append(parameter)
            continue
        parameter.grad = summed_rows(parameter.grad)
        if parameter.grad._nnz():
            rows.append(parameter.grad._values())
    gradients = [p.grad for p in dense if p.grad is not None] + rows
    total: Tensor = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    clip_grads_with_norm_(dense, max_norm, total, foreach)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for values in rows:
        values.mul_(scale.to(values.device))
    return total
