"""Increasing functions of the logits with their parameters, by name."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_bool, check_choice, check_int, check_nonnegative, check_number
from hstree._numerics import is_transformed
from hstree.heads.state import fill
from hstree.ops import LogitFunction

POINTS = 64
MOST_INTERVALS = 2**24
"""More intervals, or units, than numbers that float32 tells apart have no effect."""


class Function(nn.Module, ABC):
    """An increasing function f for softmax(f(logits)), with or without parameters."""

    name: ClassVar[str]

    def __init__(self) -> None:  # no arguments, as ``config`` finds
        super().__init__()

    @abstractmethod
    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        """The function with its current parameters, for logits of ``dtype``. ``device``: that of
        the logits; None: the CPU. Parameters stay on theirs."""

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer: the trainable parameters, at the head's learning rate
        and without weight decay."""
        own = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return [{"params": own, "lr": lr, "weight_decay": 0.0}] if own else []

    def reset(self) -> None:
        """Set the parameters to their initial values. Not called ``reset_parameters``, because the
        bias of a head depends on these values: callers that reset every module would break it."""

    def config(self) -> dict[str, Any]:
        """Arguments that build this function again, serializable as JSON: the attributes of their
        names."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    @torch.no_grad()
    def inverse(self, value: Tensor) -> Tensor:
        """Logits x [V], float64, such that f(x) has the same differences as ``value`` [V]; the
        greatest logit equals the greatest value."""
        top = value.max().reshape(1)
        return self.solve(value + (self(torch.float64, value.device)(top) - top))

    @torch.no_grad()
    def solve(self, wanted: Tensor) -> Tensor:
        """Logits x [V] with f(x) = ``wanted`` [V], float64; within the range of f."""
        function = self(torch.float64, wanted.device)
        reach = 1e3 if function.table is None else function.radius
        low, high = torch.full_like(wanted, -reach), torch.full_like(wanted, reach)
        # More halvings than float64 has bits.
        for _ in range(80):
            middle = (low + high) / 2
            below = function(middle) < wanted
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return (low + high) / 2


class Identity(Function):
    """f(x) = x, for the softmax."""

    name = "softmax"

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        return LogitFunction()

    @torch.no_grad()
    def solve(self, wanted: Tensor) -> Tensor:
        return wanted


class GSS(Function):
    """f(x) = k (x - c) + c - (k - 1) log(1 + exp(x - c)): slope k far below c, 1 far above.

    Raises:
        ValueError: unless c is finite and k finite and positive.
    """

    name = "gss"

    def __init__(self, c: float = -1.5, k: float = 2.5) -> None:
        super().__init__()
        self.c, self.k = check_number("c", c), check_number("k", k, positive=True)

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        return LogitFunction(self.c, self.k)


class SigSoftmax(Function):
    """f(x) = 2 x - log(1 + exp(x)) = x + log sigmoid(x)."""

    name = "sigsoftmax"

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        return LogitFunction(0.0, 2.0)


class PLIF(Function):
    """Piecewise linear increasing function with slopes softplus(v) in K equal intervals of [-R, R].

    Its arguments are those of :class:`hstree.PLIF`.

    Raises:
        ValueError: for K below 1, an R outside [1e-6, 1e6], a learning rate that is not positive,
            or a deviation or decay below 0.
    """

    name = "plif"

    def __init__(
        self,
        intervals: int = 100_000,
        radius: float = 20.0,
        frozen: bool = False,
        *,
        slope_std: float = 1.0,
        slope_learning_rate: float = 0.02,
        slope_decay: float = 0.0,
    ) -> None:
        super().__init__()
        self.intervals = check_int("intervals", intervals, 1, MOST_INTERVALS)
        self.radius = check_number("radius", radius, positive=True)
        if not 1e-6 <= self.radius <= 1e6:
            raise ValueError(f"radius: expected a number from 1e-6 to 1e6, got {radius!r}")
        self.frozen = check_bool("frozen", frozen)
        self.slope_std = check_nonnegative("slope_std", slope_std)
        self.slope_learning_rate = check_number(
            "slope_learning_rate", slope_learning_rate, positive=True
        )
        self.slope_decay = check_nonnegative("slope_decay", slope_decay)
        self.v = nn.Parameter(torch.empty(intervals), requires_grad=not frozen)
        self.reset()

    def reset(self) -> None:
        # softplus(log(e - 1)) = 1
        nn.init.normal_(self.v, math.log(math.e - 1), self.slope_std)

    def slopes(self) -> Tensor:
        """The slopes [K], positive; float32 or float64."""
        return F.softplus(self.v if self.v.dtype == torch.float64 else self.v.float())

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        return LogitFunction.plif(self.slopes().to(dtype), self.radius)

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        groups = super().parameter_groups(self.slope_learning_rate)
        return [group | {"weight_decay": self.slope_decay} for group in groups]


def _sums(x: Tensor, u: Tensor, v: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and f'(x) [P] of f(x) = sum_i v_i sigmoid(u_i x + b_i): x [P], the others [K]."""
    s = torch.addmm(b, x[:, None], u[None]).sigmoid()
    return s @ v, (s - s * s) @ (u * v)


class _Sums(torch.autograd.Function):
    """:func:`_sums`, 64 points at a time, with gradients that are computed in the given dtype: in
    float32 they take half of the time."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, u: Tensor, v: Tensor, b: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*(tensor.to(dtype) for tensor in (x, u, v, b)))
        parts = [_sums(some, u, v, b) for some in torch.split(x, POINTS)]
        value, derivative = (torch.cat(part) for part in zip(*parts, strict=True))
        return value, derivative

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, u, v, b = ctx.saved_tensors
        # Columns: the gradients of f and f', and their products with x.
        grad = torch.stack(grads, 1).to(x.dtype)
        grad = torch.cat([grad, x[:, None] * grad], 1)
        of_s, of_slope, of_bend = (grad.new_zeros(len(u), 4) for _ in range(3))
        for some, g in zip(torch.split(x, POINTS), torch.split(grad, POINTS), strict=True):
            s = torch.addmm(b, some[:, None], u[None]).sigmoid_()
            slope = s - s * s
            of_s.addmm_(s.t(), g)
            of_slope.addmm_(slope.t(), g)
            of_bend.addmm_((slope - 2 * s * slope).t(), g)
        # f = v s and f' = u v s' for a unit with s = sigmoid(u x + b), where ds = s' (x du + db).
        grad_u = v * (of_slope[:, 2] + u * of_bend[:, 3] + of_slope[:, 1])
        grad_v = of_s[:, 0] + u * of_slope[:, 1]
        grad_b = v * (of_slope[:, 0] + u * of_bend[:, 1])
        return None, *(grad.to(grads[0].dtype) for grad in (grad_u, grad_v, grad_b)), None


class MonotonicNetwork(Function):
    """f(x) = sum_i v_i sigmoid(u_i x + b_i); v and u are positive, the softplus of parameters.

    The constant of the paper's formula cancels in the softmax and is omitted.

    f has one variable. Instead of K sigmoids for every logit, f and f' are computed at
    ``intervals`` + 1 knots in [-64, 64] and interpolated by cubics. The error of f is at most
    ``h^4 / 384 max |f''''| <= 3.3e-4 h^4 sum_i v_i u_i^4`` for knots h = 128 / intervals apart:
    1.3e-8 for the initial v and u. Beyond +-64 the function is continued linearly. Parameters get
    the exact gradient of the interpolated function.

    Initially u = 1, v = 40 / K, and the inflections are spaced evenly in [-20, 20], where f is
    nearly the identity.

    Args:
        units: number of hidden units, K.
        intervals: number of intervals of the interpolation.

    Raises:
        ValueError: for sizes below 1.
    """

    name = "monotonic"
    radius = 64.0

    def __init__(self, units: int = 1000, intervals: int = 4096) -> None:
        super().__init__()
        self.units = check_int("units", units, high=MOST_INTERVALS)
        self.intervals = check_int("intervals", intervals, 1, MOST_INTERVALS)
        self.u, self.v, self.b = (nn.Parameter(torch.empty(units)) for _ in range(3))
        self.reset()

    def reset(self) -> None:
        # u = 1 and v = 40 / K: sigmoids at equal distances in [-20, 20] add up to about x + 20
        # there.
        nn.init.constant_(self.u, math.log(math.expm1(1.0)))
        nn.init.constant_(self.v, math.log(math.expm1(40 / self.units)))
        fill(self.b, (np.arange(self.units) + 0.5) * (40 / self.units) - 20)

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        u, v, b = F.softplus(self.u.double()), F.softplus(self.v.double()), self.b.double()
        ends = (-self.radius, self.radius)
        knots = torch.linspace(*ends, self.intervals + 1, dtype=u.dtype, device=u.device)
        plain = torch.compiler.is_compiling() or is_transformed()
        own: Any = _Sums.apply
        value, slope = _sums(knots, u, v, b) if plain else own(knots, u, v, b, dtype)
        return LogitFunction.cubic(value, slope, self.radius).to(dtype)


class Scaled(Function):
    """f(x) = s x, or f(x) = c tanh(s x / c), which is nearly s x far below the soft cap c.

    The hyperbolic tangent is interpolated by cubics between 8,193 knots in s |x| <= 16 c, with an
    error below 3e-12 c, and continued with the slope at the end, 5e-14 s.

    Raises:
        ValueError: for a scale or a cap that is not finite and positive.
    """

    name = "scaled"
    intervals = 8192

    def __init__(self, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.scale, self.soft_cap = check_number("scale", scale, positive=True), soft_cap
        if soft_cap is not None:
            self.soft_cap = check_number("soft_cap", soft_cap, positive=True)

    def forward(self, dtype: torch.dtype, device: torch.device | None = None) -> LogitFunction:
        if self.soft_cap is None:
            line = torch.tensor([[-self.scale, 2 * self.scale]], dtype=dtype, device=device)
            return LogitFunction(table=line, radius=1.0)
        knots = torch.linspace(-16, 16, self.intervals + 1, dtype=torch.float64, device=device)
        value = knots.tanh()
        slope = self.scale * (1 - value**2)
        radius = 16 * self.soft_cap / self.scale
        return LogitFunction.cubic(self.soft_cap * value, slope, radius).to(dtype)

    @torch.no_grad()
    def solve(self, wanted: Tensor) -> Tensor:
        return wanted / self.scale if self.soft_cap is None else super().solve(wanted)


FUNCTIONS: dict[str, type[Function]] = {
    kind.name: kind for kind in (Identity, SigSoftmax, GSS, PLIF, MonotonicNetwork, Scaled)
}


def build_function(name: str, options: dict[str, Any] | None = None) -> Function:
    """Build a function by name: "softmax", "sigsoftmax", "gss", "plif", "monotonic" or "scaled".

    Args:
        name: name of the function.
        options: arguments of the function; None: its defaults.

    Raises:
        ValueError: for an unknown name, or options that the function does not have.
    """
    check_choice("function", name, FUNCTIONS)
    try:
        return FUNCTIONS[name](**(options or {}))
    except TypeError as error:
        raise ValueError(f"function_options: {error}") from None
