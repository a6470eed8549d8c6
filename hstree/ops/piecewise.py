"""Piecewise polynomials by table lookup: ``torch.ops.hstree.piecewise``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import in_torch_func
from hstree._numerics import is_transformed
from hstree.ops._gradient import once, register_gradient

_op = torch.ops.hstree.piecewise.default


def piecewise(input: Tensor, table: Tensor, radius: float) -> Tensor:
    r"""A piecewise polynomial of each element, over K equal intervals of [-radius, radius].

    .. math::
        f(x) = \sum_m a_{jm} u^m, \qquad u = \frac{K (x + R)}{2 R} - j, \quad
        j = \lfloor K (x + R) / (2 R) \rfloor

    A knot belongs to the interval on its right. Beyond [-R, R] the function is continued linearly
    with its slope at -R or R.

    Equivalent to, for width 2::

        t = (input + radius) * (len(table) / (2 * radius))
        j = t.floor().clamp(0, len(table) - 1).long()
        output = table[j, 0] + table[j, 1] * (t - j)

    Computed in float32 (float64 for float64) and rounded once. The gradient of ``table`` is summed
    in 64-bit integers, and beyond [-R, R] in float64 in a fixed order: it is bitwise identical on
    every run and for every number of threads. A NaN or infinite upstream gradient makes it NaN for
    all intervals, a NaN in ``input`` for the first interval, an infinity in ``input`` for the
    interval at its end. The backward pass holds the gradients and O(K) sums.

    Args:
        input: arguments of f, any shape: float32, float64, bfloat16 or float16.
        table: coefficients a of each interval, constant first, [K, 2] or [K, 4], K from 1 to 2**23.
            Two coefficients are the value at the interval's left knot and the rise over the
            interval. float32, or float64 for float64 input.
        radius: half width of the range of the table, R > 0.

    Returns:
        f(input), shape and dtype of ``input``. NaN gives NaN. An infinity gives an infinity, or NaN
        where the slope is 0.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or radius; for a second derivative.

    Example:
        >>> import torch
        >>> from hstree.ops import piecewise
        >>> table = torch.tensor([[0.0, 3.0], [3.0, 1.0]])  # slope 3 below 0, slope 1 above
        >>> piecewise(torch.tensor([-2.0, -1.0, 0.0, 0.5, 2.0]), table, 1.0)
        tensor([-3.0000,  0.0000,  3.0000,  3.5000,  5.0000])
    """
    run: Any = _op
    if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
        run = Piecewise.apply if in_torch_func() else _record
    output: Tensor = run(input, table, radius)
    return output


def _fake(input: Tensor, table: Tensor, radius: float) -> Tensor:
    return input.new_empty(input.shape)


def _backward_fake(
    grad: Tensor, input: Tensor, table: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    return input.new_empty(input.shape), table.new_empty(table.shape)


class Piecewise(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        input, table, ctx.radius = inputs
        ctx.save_for_backward(input, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        backward = torch.ops.hstree.piecewise_backward.default
        gradients = once("piecewise", backward, grad, *ctx.saved_tensors, ctx.radius)
        grad_input, grad_table = gradients
        return grad_input, grad_table, None


torch.library.register_fake("hstree::piecewise", _fake)
torch.library.register_fake("hstree::piecewise_backward", _backward_fake)
_record = register_gradient(_op, Piecewise)
