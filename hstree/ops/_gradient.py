"""How operators are differentiated.

The file of an op has a :class:`torch.autograd.Function` whose forward pass is the op. Its gradient
is registered for the op too, so that ``torch.ops.hstree.NAME`` is differentiable by itself, and
opaque to :func:`torch.compile`. Calls take this shorter way, except under torch.func, which raises
an error for ops with gradients from :func:`torch.library.register_autograd` (pytorch issues 168393
and 179652; tests/ops/test_registration.py tells when this changes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hstree._numerics import is_transformed


def register_gradient(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Register the gradient of a Function for the op that is its forward pass, and return what
    calls the op: under torch.func, and in forward mode, which it refuses, by the Function."""
    op: Any = function.forward
    torch.library.register_autograd(op, function.backward, setup_context=function.setup_context)

    def call(*inputs: Any) -> Any:
        return function.apply(*inputs) if is_transformed() else op(*inputs)  # type: ignore[no-untyped-call]

    return call


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
