"""How operators are differentiated.

The file of an op has a :class:`torch.autograd.Function` whose forward pass is the op, and which the
public function applies. :func:`register_gradient` registers its gradient for the op too, so that
``torch.ops.hstree.NAME`` is differentiable by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def recorder(function: Any) -> Callable[..., Any]:
    """``function.apply`` outside of torch.func, for a Function with ``setup_context``: without
    binding the inputs to names, which takes as long as a small op, 20 microseconds."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply
    return apply


def register_gradient(op: Any, function: Any) -> Callable[..., Any]:
    """Register the gradient of a Function for the op that is its forward pass, and return its
    :func:`recorder`.

    Where nothing is differentiated, and in code for torch.compile, to which it is opaque, the op is
    called; elsewhere the Function is applied. torch.func raises an error for ops with gradients
    from torch.library.register_autograd (pytorch issues 168393 and 179652;
    tests/ops/test_registration.py tells when this changes), and these take longer: for eight rows
    36 microseconds in place of 22 forward.
    """
    torch.library.register_autograd(op, function.backward, setup_context=function.setup_context)
    return recorder(function)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name, *_ = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hstree::{ctx.name}: expected to be differentiated once, got a second derivative "
            "(create_graph=True), which is not implemented"
        )


def once(name: str, function: Callable[..., Any], *inputs: Any) -> Any:
    """``function(*inputs)``, the gradients of the op ``name``: an error where they are
    differentiated. :func:`torch.autograd.function.once_differentiable` sees only upstream gradients
    with a graph, and gives gradients without one for all others."""
    if torch.is_grad_enabled():  # create_graph, or torch.func
        return _Once.apply(name, function, *inputs)  # type: ignore[no-untyped-call]
    return function(*inputs)


def register_no_gradient(name: str, other: str) -> None:
    """Make the gradient of an op that has none an error; ``other``: what has one for the same
    classes."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"hstree::{name}: not differentiable; compute the log-probabilities of its classes "
            f"with {other}"
        )

    torch.library.register_autograd(f"hstree::{name}", backward)
