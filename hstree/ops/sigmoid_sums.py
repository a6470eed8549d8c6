"""Sums of many sigmoids of one variable: ``torch.ops.hstree.sigmoid_sums``, written in Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._autograd import define, no_second_derivative, register_autograd

_ROWS_AT_A_TIME = 64


def sigmoid_sums(
    x: Tensor, u: Tensor, v: Tensor, b: Tensor, *, gradient_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    r"""f(x) and f'(x) of a network with one input, one output and K hidden units.

    .. math:: f(x) = \sum_i v_i \sigma(u_i x + b_i)

    Equivalent to::

        s = (x[:, None] * u + b).sigmoid()
        value, derivative = s @ v, (s * (1 - s)) @ (u * v)

    Holds at most 64 K sigmoids, or P K in forward mode. The backward pass computes the sigmoids
    again.

    Args:
        x: inputs of the network, [P], float32 or float64, without gradient.
        u: input weights, [K], dtype of ``x``.
        v: output weights, [K], dtype of ``x``.
        b: biases, [K], dtype of ``x``.
        gradient_dtype: dtype in which the gradients are computed.

    Returns:
        f(x) [P] and f'(x) [P], dtype of ``x``.

    Raises:
        ValueError: for a wrong shape or dtype, or an x that requires a gradient.
        RuntimeError: for a second derivative in reverse mode.

    Example:
        >>> import torch
        >>> from hstree.ops import sigmoid_sums
        >>> x, one = torch.tensor([0.0]), torch.ones(1)
        >>> sigmoid_sums(x, one, one, torch.zeros(1), gradient_dtype=torch.float32)
        (tensor([0.5000]), tensor([0.2500]))
    """
    if x.dim() != 1:
        raise ValueError(f"x: expected shape [P], got {tuple(x.shape)}")
    if x.requires_grad:
        raise ValueError("x: expected constants, got a tensor that requires a gradient")
    for name, value in (("u", u), ("v", v), ("b", b)):
        if value.dim() != 1 or value.shape != u.shape or value.dtype != x.dtype:
            raise ValueError(
                f"{name}: expected shape [{len(u)}] and dtype {x.dtype}, got "
                f"{tuple(value.shape)} and {value.dtype}"
            )
    values: tuple[Tensor, Tensor] = _op(x, u, v, b, gradient_dtype)
    return values


def _forward(
    x: Tensor, u: Tensor, v: Tensor, b: Tensor, gradient_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    value, derivative = torch.empty_like(x), torch.empty_like(x)
    for begin in range(0, len(x), _ROWS_AT_A_TIME):
        rows = slice(begin, begin + _ROWS_AT_A_TIME)
        s = torch.addmm(b, x[rows, None], u[None]).sigmoid_()
        torch.mv(s, v, out=value[rows])
        torch.mv(s.addcmul_(s, s, value=-1), u * v, out=derivative[rows])
    return value, derivative


def _backward(
    grad_value: Tensor,
    grad_derivative: Tensor,
    x: Tensor,
    u: Tensor,
    v: Tensor,
    b: Tensor,
    gradient_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = gradient_dtype
    x, u, v, b = (tensor.to(dtype) for tensor in (x, u, v, b))
    # Columns: the gradients of f and f', and their products with x.
    grad = torch.stack([grad_value, grad_derivative], 1).to(dtype)
    grad = torch.cat([grad, x[:, None] * grad], 1)
    of_s, of_slope, of_bend = (grad.new_zeros(len(u), 4) for _ in range(3))
    for begin in range(0, len(x), _ROWS_AT_A_TIME):
        rows = slice(begin, begin + _ROWS_AT_A_TIME)
        g = grad[rows]
        s = torch.addmm(b, x[rows, None], u[None]).sigmoid_()
        slope = s * (1 - s)
        of_s.addmm_(s.t(), g)
        of_slope.addmm_(slope.t(), g)
        of_bend.addmm_((slope * (1 - 2 * s)).t(), g)
    # f = v s and f' = u v s' for a unit with s = sigmoid(u x + b), where ds = s' (x du + db).
    grad_v = of_s[:, 0] + u * of_slope[:, 1]
    grad_b = v * (of_slope[:, 0] + u * of_bend[:, 1])
    grad_u = v * (of_slope[:, 2] + u * of_bend[:, 3] + of_slope[:, 1])
    return grad_u.to(grad_value.dtype), grad_v.to(grad_value.dtype), grad_b.to(grad_value.dtype)


def _formula(
    x: Tensor, u: Tensor, v: Tensor, b: Tensor, gradient_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    s = (x.unsqueeze(1) * u + b).sigmoid()
    return s @ v, (s * (1 - s)) @ (u * v)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, grad_value: Tensor, grad_derivative: Tensor) -> Any:
    tensors = ctx.saved_tensors
    return None, *_backward_op(grad_value, grad_derivative, *tensors, ctx.dtype), None


_op: Any = define(
    "sigmoid_sums",
    _forward,
    lambda x, *_: (torch.empty_like(x), torch.empty_like(x)),
)
_backward_op: Any = define(
    "sigmoid_sums_backward",
    _backward,
    lambda grad, _, x, u, v, b, dtype: tuple(map(torch.empty_like, (u, v, b))),
)
register_autograd("sigmoid_sums", _gradient, setup_context=_save_for_backward, formula=_formula)
register_autograd("sigmoid_sums_backward", no_second_derivative("sigmoid_sums_backward"))
