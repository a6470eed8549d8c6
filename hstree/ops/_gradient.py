"""How operators are differentiated.

The file of an op has a :class:`torch.autograd.Function` whose forward pass is the op.
:func:`register_gradient` registers its gradient for the op, so that ``torch.ops.hstree.NAME`` is
differentiable by itself, and opaque to :func:`torch.compile`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hstree._numerics import is_transformed


def register_gradient(function: Any) -> Callable[..., Any]:
    """Register the gradient of a Function for the op that is its forward pass, and return a faster
    call of the op, which torch.func takes too.

    torch.func raises an error for ops with gradients from torch.library.register_autograd (pytorch
    issues 168393 and 179652; tests/ops/test_registration.py tells when this changes). And that
    registration is slow, as are Functions with ``setup_context``, whose arguments torch binds to
    their names: with either the path op takes 110 microseconds forward and backward for five rows,
    and 85 by the Function below.
    """
    op = function.forward
    torch.library.register_autograd(op, function.backward, setup_context=function.setup_context)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = op(*inputs)
            function.setup_context(ctx, inputs, output)
            return output

        backward = staticmethod(function.backward)

    def call(*inputs: Any) -> Any:
        if is_transformed():  # forward mode too, which the Function refuses
            return function.apply(*inputs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return Recorded.apply(*inputs)  # type: ignore[no-untyped-call]
        return op(*inputs)

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
