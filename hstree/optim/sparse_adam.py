"""Lazy Adam for row-sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hstree.ops import sparse_adam_


class SparseAdam(torch.optim.SparseAdam):
    """:class:`torch.optim.SparseAdam` with the step of a parameter as one pass over the rows that
    its gradient visits.

    For a visited row w of a parameter, with gradient g, at step k of the parameter::

        m <- beta1 m + (1 - beta1) g
        v <- beta2 v + (1 - beta2) g^2
        w <- w - lr sqrt(1 - beta2^k) / (1 - beta1^k) m / (sqrt(v) + eps)

    Lazy: rows that a gradient does not visit keep weight and moments, which do not decay meanwhile.

    Groups, state (``step``, ``exp_avg``, ``exp_avg_sq``) and :meth:`state_dict` are those of
    :class:`torch.optim.SparseAdam`, and either loads the other's. The moments of bfloat16 and
    float16 parameters are float32 here. The step takes gradients as they are if their rows
    increase strictly, as those of :class:`hstree.heads.TreeEnsemble` do, and coalesces them if
    not, as those of an embedding.

    Args:
        params: contiguous parameters, or groups of them: float32, float64, bfloat16 or float16.
            Their gradients are sparse in the first one or two dimensions.
        lr: learning rate, above 0.
        betas: decay of m and of v, each in [0, 1).
        eps: added to the denominator, above 0.
        maximize: ascend instead.

    Raises:
        ValueError: for a number out of its range, and for sparse or complex parameters.
        RuntimeError: from :meth:`step`, for a dense gradient and for a parameter or gradient that
            does not fit.

    Deterministic, for any number of threads.

    Example:
        >>> embedding = torch.nn.Embedding(5, 2, sparse=True)
        >>> optimizer = SparseAdam(embedding.parameters(), lr=0.1)
        >>> before = embedding.weight.detach().clone()
        >>> embedding(torch.tensor([3, 1])).sum().backward()
        >>> optimizer.step()
        >>> (before - embedding.weight).detach()[:, 0].abs() > 0.05
        tensor([False,  True, False,  True, False])

    Kingma and Ba, Adam: A method for stochastic optimization (ICLR 2015), algorithm 1; the lazy
    form after :class:`torch.optim.SparseAdam`.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The loss of the closure, if there is one.

        Raises:
            RuntimeError: a gradient is dense, or a parameter or gradient does not fit.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            for place, parameter in enumerate(group["params"]):
                gradient = parameter.grad
                if gradient is None:
                    continue
                if not gradient.is_sparse:
                    raise RuntimeError(
                        f"SparseAdam: parameter {place} of group {number}, shape "
                        f"{list(parameter.shape)}: expected a sparse gradient, got a dense one; "
                        f"use torch.optim.Adam for it"
                    )
                self._update(parameter, _increasing(gradient), group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in MOMENTS:
                state[name] = torch.zeros_like(parameter, dtype=_moment_dtype(parameter))
        state["step"] += 1
        if gradient._nnz() == 0:
            return
        sparse_adam_(
            parameter,
            state["exp_avg"],
            state["exp_avg_sq"],
            gradient._indices(),
            gradient._values(),
            step=state["step"],
            lr=float(group["lr"]),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            maximize=group["maximize"],
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, here or of :class:`torch.optim.SparseAdam`.

        Args:
            state_dict: the state.
        """
        super().load_state_dict(state_dict)
        # The base class has cast the moments to the parameters' dtype.
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name in MOMENTS:
                    moment = value.to(parameter.device, _moment_dtype(parameter))
                    self.state[parameter][name] = moment


MOMENTS = ("exp_avg", "exp_avg_sq")


def _moment_dtype(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _increasing(gradient: Tensor) -> Tensor:
    """The gradient, coalesced if its rows do not increase strictly already."""
    if gradient.is_coalesced():
        return gradient
    index = gradient._indices()
    row = index[0]
    for size, inner in zip(gradient.shape[1:], index[1:], strict=False):
        row = torch.add(inner, row, alpha=size)
    return gradient if bool((row[1:] > row[:-1]).all()) else gradient.coalesce()
