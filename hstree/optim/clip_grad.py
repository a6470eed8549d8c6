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
    """:func:`torch.nn.utils.clip_grad_norm_` for dense and row-sparse gradients.

    Scales all gradients in place so that their joint norm is at most ``max_norm``. Repeated rows of
    a sparse gradient are summed first, so it has the norm of its dense form.

    Lightning clips with torch's function: call this one in the ``configure_gradient_clipping`` of a
    module with row-sparse gradients.

    Args:
        parameters: parameters, or one parameter; those without a gradient are ignored.
        max_norm: largest norm.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: whether to raise for a norm that is not finite, before scaling.
        foreach: as in torch, for dense gradients.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> import torch, hstree
        >>> embedding = torch.nn.Embedding(5, 2, sparse=True)
        >>> embedding(torch.tensor([1, 3, 1])).sum().backward()  # gradients (2, 2) and (1, 1)
        >>> hstree.optim.clip_grad_norm_(embedding.parameters(), 1.0)
        tensor(3.1623)
        >>> round(float(embedding.weight.grad.to_dense().norm()), 4)
        1.0
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients, dense, sparse = [], [], []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = summed_rows(parameter.grad)
            values = parameter.grad._values()
            if values.numel():
                gradients.append(values)
                sparse.append(values)
        elif parameter.grad is not None:
            gradients.append(parameter.grad)
            dense.append(parameter)
    total: Tensor = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    # Small enough already: no pass over the gradients. On a GPU the comparison would wait.
    if total.device.type == "cpu" and max_norm / (total + 1e-6) >= 1.0:
        return total
    clip_grads_with_norm_(dense, max_norm, total, foreach)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for values in sparse:
        values.mul_(scale.to(values.device))
    return total
