"""Clipping of dense and row-sparse gradients by their joint norm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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

    Lightning clips by torch's function: a module with row-sparse gradients calls this one in its
    ``configure_gradient_clipping``.

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
    total = total_norm(parameters, norm_type, error_if_nonfinite, foreach)
    scale_gradients(parameters, max_norm, total, foreach)
    return total


def total_norm(
    parameters: Sequence[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all gradients together; the rows of sparse ones are added up on the way."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = summed_rows(parameter.grad)
            gradients += [parameter.grad._values()] if parameter.grad._nnz() else []
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
    total: Tensor = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    return total


def scale_gradients(
    parameters: Sequence[Tensor], max_norm: float, total: Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients of norm ``total``, with each row once, down to ``max_norm``."""
    sparse = [p.grad for p in parameters if p.grad is not None and p.grad.is_sparse]
    dense = [p for p in parameters if p.grad is not None and not p.grad.is_sparse]
    clip_grads_with_norm_(dense, max_norm, total, foreach)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in sparse:
        gradient._values().mul_(scale.to(gradient.device))
