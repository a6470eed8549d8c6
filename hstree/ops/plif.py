"""The piecewise linear increasing function (PLIF) with learned slopes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hstree._numerics import sum_dtype
from hstree.ops.piecewise import piecewise


def plif(input: Tensor, slopes: Tensor, radius: float = 20.0) -> Tensor:
    r"""Piecewise linear increasing function of each element, with K learned slopes.

    .. math::
        f(x) = s_j (x - x_j) + \delta \sum_{i < j} s_i, \qquad \delta = 2 R / K, \quad
        x_j = -R + j \delta, \quad j = \lfloor (x + R) / \delta \rfloor

    with j clamped to [0, K - 1]: the first and the last slope continue beyond [-R, R]. f(-R) = 0.

    Equivalent to::

        piecewise(input, plif_table(slopes, radius), radius)

    Deterministic, like :func:`piecewise`.

    Args:
        input: arguments of f, any shape: float32, float64, bfloat16 or float16.
        slopes: slopes of the intervals, s [K], float32, or float64 for float64 input. They must be
            greater than 0, which is not checked.
        radius: half width of the range of the intervals, R > 0.

    Returns:
        f(input), shape and dtype of ``input``.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or radius.

    Example:
        >>> import torch
        >>> from hstree.ops import plif
        >>> slopes = torch.tensor([1.0, 3.0], requires_grad=True)
        >>> plif(torch.tensor([-2.0, -1.0, 0.0, 0.5]), slopes, radius=1.0).tolist()
        [-1.0, 0.0, 1.0, 2.5]

    Source: Ganea, Gelly, Bécigneul and Severyn, Breaking the softmax bottleneck via learnable
    monotonic pointwise non-linearities, ICML 2019.
    """
    table = plif_table(slopes, radius)
    if table.dtype != sum_dtype(input.dtype):
        raise RuntimeError(
            f"slopes: expected torch.float64 with input of torch.float64 and only then, got "
            f"{slopes.dtype} with {input.dtype}"
        )
    return piecewise(input, table, radius)


def plif_table(slopes: Tensor, radius: float = 20.0) -> Tensor:
    r"""The table of :func:`piecewise` for a PLIF: knot values and rises.

    .. math::
        a_{j0} = \delta \sum_{i < j} s_i, \qquad a_{j1} = \delta s_j, \qquad \delta = 2 R / K

    Equivalent to::

        rise = slopes.double() * (2 * radius / len(slopes))
        table = torch.stack([rise.cumsum(0) - rise, rise], dim=1).to(slopes.dtype)

    The knots and the gradients are sums of integers in units of at most max(slopes) R 2**-60: they
    are bitwise identical on every run, also on a GPU. A slope that is not finite makes every knot
    NaN.

    Args:
        slopes: slopes of the intervals, s [K], K at least 1, a floating-point dtype.
        radius: half width of the range of the intervals, R > 0.

    Returns:
        The table, [K, 2], float64 for float64 slopes, else float32. Differentiable.

    Raises:
        RuntimeError: for a wrong shape, dtype or radius.

    Example:
        >>> import torch
        >>> from hstree.ops import plif_table
        >>> plif_table(torch.tensor([1.0, 3.0]), radius=1.0)
        tensor([[0., 1.],
                [1., 3.]])
    """
    if slopes.dim() != 1 or slopes.shape[0] < 1:
        raise RuntimeError(f"slopes: expected shape [K], K >= 1, got {tuple(slopes.shape)}")
    if not slopes.is_floating_point():
        raise RuntimeError(f"slopes: expected a floating-point dtype, got {slopes.dtype}")
    if not 0 < radius < math.inf:
        raise RuntimeError(f"radius: expected a finite number greater than 0, got {radius}")
    rise = slopes.double() * (2 * radius / slopes.shape[0])
    return torch.stack([_exclusive_sums(rise), rise], dim=1).to(sum_dtype(slopes.dtype))


class _ExclusiveSums(torch.autograd.Function):
    """Exclusive prefix sums of the terms [..., K], in float64; all NaN if a term is not finite.

    Summed as integers, because a floating-point cumsum on a GPU differs between runs.
    """

    @staticmethod
    def forward(terms: Tensor) -> Tensor:
        bound = terms.abs().amax(-1, keepdim=True) * terms.shape[-1]
        # Multiples of one power of two that fit 62 bits: sums of whole numbers are exact in any
        # order.
        exponent = torch.frexp(bound).exponent.clamp(min=-961)
        scale = (62 - exponent).double().exp2().masked_fill(~bound.isfinite(), math.nan)
        whole = (terms * scale).round().long()
        return (whole.cumsum(-1) - whole) / scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _exclusive_sums(grad.flip(-1)).flip(-1)


def _exclusive_sums(terms: Tensor) -> Tensor:
    sums: Tensor = _ExclusiveSums.apply(terms)  # type: ignore[no-untyped-call]
    return sums
