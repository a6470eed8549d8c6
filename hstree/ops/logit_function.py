"""Pointwise increasing functions of the logits, in the form that the kernels read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops.piecewise import piecewise
from hstree.ops.plif import plif_table


@dataclass(frozen=True)
class LogitFunction:
    r"""An increasing function f for softmax(f(logits)).

    Without a table it is the generalized sigsoftmax, which is the identity for k = 1:

    .. math:: f(x) = k (x - c) + c - (k - 1) \log(1 + e^{x - c}) = x + (k - 1) \log\sigma(x - c)

    With a table it is the function of :func:`hstree.ops.piecewise`.

    Args:
        c: point at which the generalized sigsoftmax bends.
        k: slope of the generalized sigsoftmax far below c, positive.
        table: coefficients, [K, 2] or [K, 4], float32 (float64 for float64 logits); None: no table.
        radius: half width of the range of the table, R: it spans [-R, R].

    Raises:
        ValueError: if c is not finite, or k or the radius is not finite and positive.

    Example:
        >>> import torch
        >>> from hstree.ops import LogitFunction
        >>> LogitFunction(c=0.0, k=2.0)(torch.tensor([-3.0, 0.0, 3.0]))  # sigsoftmax
        tensor([-6.0486, -0.6931,  2.9514])
    """

    c: float = 0.0
    k: float = 1.0
    table: Tensor | None = None
    radius: float = 1.0

    def __post_init__(self) -> None:
        # Comparisons, as torch.compile cannot trace math.isfinite of a symbolic float.
        if not -math.inf < self.c < math.inf:
            raise ValueError(f"c: expected a finite number, got {self.c}")
        for name, value in (("k", self.k), ("radius", self.radius)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a finite positive number, got {value}")

    @classmethod
    def plif(cls, slopes: Tensor, radius: float = 20.0) -> LogitFunction:
        """The function of :func:`hstree.ops.plif` with the given slopes [K]."""
        return cls(table=plif_table(slopes, radius), radius=radius)

    @classmethod
    def cubic(cls, value: Tensor, derivative: Tensor, radius: float) -> LogitFunction:
        """The piecewise cubic with the given values and derivatives [K + 1] at evenly spaced knots
        in [-R, R] (Hermite interpolation)."""
        # Hermite interpolation: the value and the slope at both ends of an interval, which is [0,
        # 1].
        rise = value[1:] - value[:-1]
        slope = (2 * radius / len(rise)) * derivative
        begin, end = slope[:-1], slope[1:]
        table = torch.stack(
            [value[:-1], begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise], dim=1
        )
        return cls(table=table, radius=radius)

    def to(self, dtype: torch.dtype) -> LogitFunction:
        """The same function with its table in ``dtype``."""
        return self if self.table is None else replace(self, table=self.table.to(dtype))

    def __call__(self, logits: Tensor) -> Tensor:
        """f(logits), elementwise; differentiable in the logits and the table."""
        if self.table is not None:
            return piecewise(logits, self.table, self.radius)
        if self.k == 1:
            return logits
        return logits + (self.k - 1) * F.logsigmoid(logits - self.c)


IDENTITY = LogitFunction()
