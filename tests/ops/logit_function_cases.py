"""Batches for piecewise and for target_log_softmax, and how their results are judged.

Error bounds follow from the formulas, element by element: u takes two roundings, of the rate and of
the sum, a polynomial a few, a fixed-point sum half a quantum for each term. Inputs keep off the
knots by as much as a float32 t may be wrong, since the derivative jumps there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from reference.piecewise import piecewise_reference
from reference.target_log_softmax import target_log_softmax_reference
from torch import Tensor

from hstree.ops import piecewise


def judge(name: str, got: Tensor, true: Tensor, eager: Tensor) -> None:
    """The error of `got` is at most that of the eager computation in the precision of the inputs,
    and a few roundings to that precision of the largest value."""
    assert got.shape == true.shape, name
    if not got.numel():
        return
    error = (got.detach().cpu().double() - true).abs().max()
    eager_error = (eager.double() - true).abs().max()
    if not eager_error.isfinite():  # float16 overflows where float32 sums do not
        eager_error = torch.zeros(())
    # In float32 sums of hundreds of products have another order than torch's.
    roundings = {torch.float64: 64, torch.float32: 8}.get(eager.dtype, 4)
    margin = roundings * torch.finfo(eager.dtype).eps * true.abs().max()
    assert error <= eager_error + margin, (
        f"{name}: error {error:.3g}, eager {eager_error:.3g}, margin {margin:.3g}"
    )


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")


def accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def off_knots(
    draw: Callable[[int], np.ndarray], count: int, intervals: int, radius: float, dtype: torch.dtype
) -> Tensor:
    """`count` values, rounded to a dtype, for which t is not within its own error of an integer."""
    rate = intervals / (2 * radius)
    error = torch.finfo(accumulate(dtype)).eps * intervals
    kept = torch.empty(0, dtype=dtype)
    while len(kept) < count:
        x = torch.from_numpy(draw(count + 8)).to(dtype)
        t = x.double() * rate
        t = t + intervals / 2
        kept = torch.cat([kept, x[(t - t.round()).abs() > error]])
    return kept[:count]


# piecewise


@dataclass(frozen=True)
class PiecewiseCase:
    why: str
    shape: tuple[int, ...] = (29, 37)
    intervals: int = 100
    radius: float = 5.0
    spread: float = 2.0  # standard deviation of the inputs
    decades: float = 3.0  # over which the gradients spread
    dtypes: tuple[torch.dtype, ...] = ()

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


PIECEWISE_CASES = (
    PiecewiseCase("matrix"),
    PiecewiseCase("no dimension", shape=()),
    PiecewiseCase("no element", shape=(0, 5)),
    PiecewiseCase("one element", shape=(1,)),
    PiecewiseCase("vectors and a rest", shape=(3, 5, 11)),
    PiecewiseCase(
        "many elements in few intervals, for several blocks", shape=(7, 10_007), intervals=3
    ),
    PiecewiseCase("one interval", intervals=1),
    PiecewiseCase("two intervals", intervals=2),
    PiecewiseCase("odd number of intervals, a knot on neither side of 0", intervals=7),
    PiecewiseCase(
        "intervals as published", shape=(60, 100), intervals=100_000, radius=20.0, spread=5.0
    ),
    PiecewiseCase("a million intervals", intervals=1_000_000, radius=20.0, spread=5.0),
    PiecewiseCase("a rate that is no binary fraction", shape=(999,), intervals=1000, radius=3.7),
    PiecewiseCase("most elements outside", intervals=10, radius=0.5, spread=5.0),
    PiecewiseCase("small radius", radius=2.0**-10, spread=2.0**-11),
    PiecewiseCase("large radius", intervals=1000, radius=1e4, spread=3e3),
    PiecewiseCase("gradients over sixty decades", shape=(30, 100), decades=60.0),
    # Of CUDA: more than the threads of a grid take at once, and sums in shared memory of two sizes.
    PiecewiseCase("several steps of the grid", shape=(2 * 1024 * 256 + 77,), intervals=16,
                  dtypes=(torch.float64,)),
    PiecewiseCase("sums in more than 48 KiB of shared memory", shape=(16384,), intervals=4000,
                  dtypes=(torch.bfloat16,)),
    PiecewiseCase("sums of few intervals", shape=(3001,), intervals=12),
)  # fmt: skip


@dataclass
class PiecewiseBatch:
    """Arguments of the op and a gradient of its output."""

    input: Tensor
    table: Tensor
    radius: float
    grad: Tensor

    def arguments(self) -> tuple[Tensor, Tensor, float]:
        return self.input, self.table, self.radius

    def to(self, device: torch.device) -> PiecewiseBatch:
        return replace(self, input=self.input.to(device), table=self.table.to(device),
                       grad=self.grad.to(device))  # fmt: skip


def piecewise_batch(
    case: PiecewiseCase, width: int, dtype: torch.dtype, seed: int = 0
) -> PiecewiseBatch:
    """The polynomials of neighbouring intervals have nothing to do with each other: an element that
    is taken for another interval's is far off."""
    random = np.random.default_rng(seed)
    count = int(np.prod(case.shape))
    draw = lambda n: case.spread * random.standard_normal(n)  # noqa: E731
    input = off_knots(draw, count, case.intervals, case.radius, dtype).view(case.shape)
    table = torch.from_numpy(random.standard_normal((case.intervals, width)))
    # Derivatives grow with the rate; float16 must hold the gradients nevertheless.
    decades = min(case.decades, 6.0) if dtype == torch.float16 else case.decades
    largest = min(1.0, 2 * case.radius / case.intervals) if dtype == torch.float16 else 1.0
    grad = random.standard_normal(count) * 10.0 ** random.uniform(-decades / 2, decades / 2, count)
    grad = torch.from_numpy(largest * grad).to(dtype).view(case.shape)
    return PiecewiseBatch(input, table.to(accumulate(dtype)), case.radius, grad)


def piecewise_gradients(
    batch: PiecewiseBatch, function: Callable[[Tensor, Tensor, float], Tensor] = piecewise
) -> list[Tensor]:
    """Output and gradients of input and table."""
    leaves = [x.detach().requires_grad_() for x in (batch.input, batch.table)]
    output = function(*leaves, batch.radius)
    output.backward(batch.grad)
    return [output.detach(), *(x.grad for x in leaves)]


def in_float64(batch: PiecewiseBatch) -> PiecewiseBatch:
    return PiecewiseBatch(
        batch.input.double().cpu(), batch.table.double().cpu(), batch.radius,
        batch.grad.double().cpu(),
    )  # fmt: skip


@dataclass
class Place:
    """Where elements [n] lie: interval, powers of u and the rounding error of u."""

    interval: Tensor  # [n]
    weight: Tensor  # [n, width], magnitude of the derivative by each coefficient
    derivative: Tensor  # [n, width], magnitude of its own derivative by u
    second: Tensor  # [n, width]
    error: Tensor  # [n], of u, as it is computed and here
    rate: float


def place(input: Tensor, table: Tensor, radius: float, eps: float) -> Place:
    """All in float64."""
    intervals, width = table.shape
    rate = intervals / (2 * radius)
    t = input.reshape(-1) * rate + intervals / 2
    interval = t.floor().clamp(0, intervals - 1)
    u = input.reshape(-1) * rate + (intervals / 2 - interval)
    inside, m = u.clamp(0, 1)[:, None], torch.arange(width)
    derivative = torch.where(m > 0, m * inside ** (m - 1).clamp(min=0), 0.0)
    second = torch.where(m > 1, m * (m - 1) * inside ** (m - 2).clamp(min=0), 0.0)
    weight = inside**m + derivative * (u[:, None] - inside).abs()
    error = (eps + torch.finfo(torch.float64).eps) * (input.reshape(-1).abs() * rate + u.abs())
    return Place(interval.long(), weight, derivative, second, error, rate)


def by_interval(where: Place, values: Tensor, intervals: int) -> Tensor:
    return values.new_zeros(intervals, values.shape[1]).index_add_(0, where.interval, values)


def within(name: str, got: Tensor, true: Tensor, bound: Tensor) -> None:
    """Rounded once to its own dtype, beyond the bound."""
    rounding = torch.finfo(got.dtype).eps / 2 * true.abs() + torch.finfo(got.dtype).tiny
    assert got.shape == true.shape, name
    error = (got.detach().cpu().double() - true).abs()
    worst = (error / (rounding + bound)).max() if got.numel() else torch.zeros(())
    assert worst <= 1, f"{name}: an error is {worst:.3g} times what rounding allows"


def check_piecewise(
    case: PiecewiseCase, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Output and gradients against the float64 reference of the same values."""
    batch = piecewise_batch(case, width, dtype)
    exact = in_float64(batch)
    true = piecewise_gradients(exact, piecewise_reference)
    got = piecewise_gradients(batch.to(device))
    assert [x.dtype for x in got] == [dtype, dtype, accumulate(dtype)]
    if dtype in (torch.bfloat16, torch.float16):
        eager = piecewise_gradients(batch, piecewise_reference)
        for name, *values in zip(("output", "grad_input"), got, true, eager, strict=False):
            judge(name, *values)
    eps = torch.finfo(accumulate(dtype)).eps
    where = place(*exact.arguments(), eps)
    coefficient = exact.table[where.interval].abs()
    shape = case.shape
    roundings = 4 * width * eps
    bound = roundings * (coefficient * where.weight).sum(1)
    bound += 2 * (coefficient * where.derivative).sum(1) * where.error
    within("output", got[0], true[0], bound.view(shape))
    bound = roundings * (coefficient * where.derivative).sum(1)
    bound += 2 * (coefficient * where.second).sum(1) * where.error
    within("grad_input", got[1], true[1], (where.rate * bound).view(shape) * exact.grad.abs())
    grad = exact.grad.reshape(-1).abs()[:, None]
    bound = grad * (4 * eps * where.weight + 2 * where.derivative * where.error[:, None])
    if len(grad):
        bound += len(grad) * grad.max() * 2.0**-61
    within("grad_table", got[2], true[2], by_interval(where, bound, case.intervals))


# target_log_softmax


@dataclass(frozen=True)
class MonotoneCase:
    """`intervals` and `width` of a table; without intervals, c and k."""

    why: str
    rows: int = 29
    classes: int = 83
    c: float = 0.0
    k: float = 1.0
    intervals: int = 0
    width: int = 2
    radius: float = 5.0
    spread: float = 3.0
    ignored: float = 0.2  # share of the rows

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


SHAPES = (
    ("vectors and a rest", {}),
    ("one class", {"classes": 1}),
    ("two classes", {"classes": 2}),
    ("vectors alone", {"classes": 64}),
    ("many classes", {"rows": 5, "classes": 5003}),
    ("many rows", {"rows": 300, "classes": 19}),
    ("zero rows", {"rows": 0}),
    ("one row", {"rows": 1, "ignored": 0.0}),
    ("all rows ignored", {"ignored": 1.0}),
    ("logits of order 100", {"spread": 100.0}),
)
FUNCTIONS = (
    ("softmax", {}),
    ("SigSoftmax", {"k": 2.0}),
    ("GSS", {"c": -1.5, "k": 2.5}),
    ("GSS, steeper above c", {"c": 1.0, "k": 0.25}),
    ("linear table", {"intervals": 100}),
    ("cubic table", {"intervals": 20, "width": 4}),
)
# The CUDA kernels take a row with a warp up to 1024 classes in float32, 512 in float64, else with a
# block, which is wide from 16 times as many on, and sum a table's gradient in shared memory where
# there are many terms for an interval.
EDGES = (
    *(MonotoneCase(f"{classes} classes, {f}", rows=6, classes=classes, **options)
      for classes, (f, options) in zip((31, 32, 256, 512, 513, 1023, 1024, 1025, 33, 64),
                                       FUNCTIONS * 2, strict=False)),
    *(MonotoneCase(f"{classes} classes, linear table", rows=6, classes=classes, intervals=40)
      for classes in (256, 1024, 1025)),
    MonotoneCase("a wide block", rows=2, classes=16_389, ignored=0.0),
    MonotoneCase("few intervals", rows=7, classes=90, intervals=5),
    MonotoneCase("few cubics", rows=7, classes=90, intervals=3, width=4),
    MonotoneCase("several rows for each block of sums", rows=4200, classes=3, intervals=20),
)  # fmt: skip
MONOTONE_CASES = (
    *(MonotoneCase(f"{f}, {s}", **options, **shape)
      for f, options in FUNCTIONS for s, shape in SHAPES),
    MonotoneCase("one interval", intervals=1),
    MonotoneCase("intervals as published", intervals=100_000, radius=20.0),
    MonotoneCase("a million intervals, cubic", intervals=1_000_000, width=4, radius=20.0),
    MonotoneCase("most logits outside", intervals=10, radius=0.5),
    *EDGES,
)  # fmt: skip


@dataclass
class MonotoneBatch:
    logits: Tensor
    target: Tensor
    c: float
    k: float
    table: Tensor | None
    radius: float
    grad: Tensor  # of log_prob

    def arguments(self) -> tuple[Any, ...]:
        return self.logits, self.target, self.c, self.k, self.table, self.radius

    def map(self, convert: Callable[[Tensor], Tensor]) -> MonotoneBatch:
        """With a function applied to the floating-point tensors."""
        table = None if self.table is None else convert(self.table)
        return replace(self, logits=convert(self.logits), table=table, grad=convert(self.grad))

    def to(self, device: torch.device) -> MonotoneBatch:
        return replace(self.map(lambda x: x.to(device)), target=self.target.to(device))


def increasing_table(intervals: int, width: int, radius: float, seed: int = 0) -> Tensor:
    """A continuous increasing function, f(-radius) = -radius, of slopes around 1; float64."""
    random = np.random.default_rng(seed)
    rise = random.lognormal(0.0, 0.5, (intervals, width - 1)) * 2 * radius / intervals
    rise /= width - 1
    ends = np.cumsum(rise.sum(1)) - radius
    return torch.from_numpy(np.column_stack([[-radius, *ends[:-1]], rise]))


def monotone_batch(
    case: MonotoneCase, dtype: torch.dtype = torch.float64, seed: int = 0
) -> MonotoneBatch:
    random = np.random.default_rng(seed)
    count = case.rows * case.classes
    draw = lambda n: case.spread * random.standard_normal(n)  # noqa: E731
    table = None
    logits = torch.from_numpy(draw(count)).to(dtype)
    if case.intervals:
        logits = off_knots(draw, count, case.intervals, case.radius, dtype)
        table = increasing_table(case.intervals, case.width, case.radius).to(dtype)
    target = random.integers(0, case.classes, case.rows)
    target[random.random(case.rows) < case.ignored] = -1
    # Of either sign, over three orders of magnitude.
    grad = random.standard_normal(case.rows) * 10.0 ** random.uniform(-2, 1, case.rows)
    return MonotoneBatch(
        logits.view(case.rows, case.classes), torch.from_numpy(target), case.c, case.k, table,
        case.radius, torch.from_numpy(grad).to(dtype),
    )  # fmt: skip


def monotone_gradients(batch: MonotoneBatch, at_once: bool = False) -> list[Tensor]:
    """log_prob, log_normalizer, gradient of the logits, and of the table (float64) if there is one;
    at_once: from target_log_softmax_gradient_."""
    ops = torch.ops.hstree
    log_prob, log_normalizer = ops.target_log_softmax(*batch.arguments())
    grad = batch.logits.clone(memory_format=torch.contiguous_format)
    if at_once:
        log_prob, grad_table = ops.target_log_softmax_gradient_(
            grad, batch.grad, batch.target, *batch.arguments()[2:]
        )
    else:
        grad_table = ops.target_log_softmax_backward_(
            grad, batch.grad, batch.target, log_normalizer, *batch.arguments()[2:]
        )
    if batch.table is None:
        assert grad_table.shape == (0, 0)
    assert grad_table.dtype == torch.float64
    return [log_prob, log_normalizer, grad, grad_table][: 3 if batch.table is None else 4]


def check_low_rows(case: MonotoneCase, device: torch.device) -> None:
    """The gradient rounded to rows of 16 bits, in wider memory that is not written elsewhere: its
    own, or that of the logits."""
    ops, batch = torch.ops.hstree, monotone_batch(case, torch.float32).to(device)
    arguments = batch.arguments()
    rows, classes = batch.logits.shape
    for dtype, extra in product((torch.bfloat16, torch.float16), (3, 16 - classes % 8)):
        for at_once, in_place in product((False, True), repeat=2):
            expected = monotone_gradients(batch, at_once)
            held = torch.full((rows, classes + extra), 7.0, device=device)
            logits = held[:, :classes].copy_(batch.logits)
            memory = held.view(dtype) if in_place else torch.full_like(held, 7, dtype=dtype)
            low = memory[:, :classes]
            if at_once:
                log_prob, grad_table = ops.target_log_softmax_gradient_(
                    logits, batch.grad, *arguments[1:], True, low
                )
                assert torch.equal(log_prob, expected[0])
            else:
                grad_table = ops.target_log_softmax_backward_(
                    logits, batch.grad, batch.target, expected[1], *arguments[2:], True, low
                )
            assert torch.equal(low, expected[2].to(dtype))
            assert bool((held[:, classes:] == 7).all())
            assert in_place or bool((memory[:, classes:] == 7).all())
            if batch.table is not None:
                assert torch.equal(grad_table, expected[3])


def check_bias(case: MonotoneCase, dtype: torch.dtype, device: torch.device) -> None:
    """The same as for logits to which it has been added, also with another one for targets."""
    batch = monotone_batch(case, dtype).to(device)
    bias = torch.linspace(-1, 2, batch.logits.shape[1], dtype=dtype).to(device)
    # Whole numbers, of which no sum is rounded.
    logits, rest = (8 * batch.logits).round() / 8, batch.arguments()[1:]
    bias = (8 * bias).round() / 8
    of_target = bias.flip(0) + 1
    bias[0] = -torch.inf
    chosen = batch.target.clamp(min=0)[:, None]
    other = (logits + bias).scatter(1, chosen, logits.gather(1, chosen) + of_target[chosen])
    both = [] if batch.table is not None else [(other, bias, of_target)]
    for expected, *biases in ((logits + bias, bias), *both):
        results = []
        for given, added in ((expected, []), (logits.clone(), biases)):
            log_prob, grad_table = torch.ops.hstree.target_log_softmax_gradient_(
                given, batch.grad, *rest, True, None, *added
            )
            results.append([log_prob, given, grad_table])
        for one, another in zip(*results, strict=True):
            assert torch.equal(one.nan_to_num(7), another.nan_to_num(7))


def monotone_reference(batch: MonotoneBatch) -> list[Tensor]:
    """The same from the reference, on the CPU; log_normalizer of the rows that are not ignored."""
    batch = batch.to(CPU)
    leaves = [x.detach().requires_grad_() for x in (batch.logits, batch.table) if x is not None]
    batch = replace(batch, logits=leaves[0], table=leaves[1] if len(leaves) == 2 else None)
    log_prob = target_log_softmax_reference(*batch.arguments())
    if log_prob.requires_grad:
        log_prob.backward(batch.grad)
    with torch.no_grad():
        log_normalizer = monotone_value(batch, batch.logits).logsumexp(1)
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return [log_prob.detach(), log_normalizer, *grads]


def monotone_value(batch: MonotoneBatch, x: Tensor) -> Tensor:
    never = x == -torch.inf
    x = x.masked_fill(never, 0.0)
    if batch.table is not None:
        f = piecewise_reference(x, batch.table, batch.radius)
    else:
        f = x + (batch.k - 1) * torch.nn.functional.logsigmoid(x - batch.c)
    return f.masked_fill(never, -torch.inf)


def check_monotone(
    case: MonotoneCase, dtype: torch.dtype, device: torch.device, at_once: bool = False
) -> None:
    """Everything against the float64 reference of the same values."""
    batch = monotone_batch(case, dtype)
    exact = batch.map(Tensor.double)
    true = monotone_reference(exact)
    got = [x.cpu() for x in monotone_gradients(batch.to(device), at_once)]
    assert [x.dtype for x in got[:3]] == [dtype] * 3
    used = batch.target >= 0
    assert not got[0][~used].any()
    assert not got[2][~used].any()
    eps = torch.finfo(dtype).eps
    x, target = exact.logits[used], exact.target[used, None]
    f = monotone_value(exact, x)
    normalizer = f.logsumexp(1, keepdim=True)
    share = (f - normalizer).exp()
    if exact.table is None:
        bend = abs(case.k - 1)
        slope = torch.full_like(x, max(1.0, case.k))  # a bound of f', as those that follow
        slope_error = 8 * eps * (1 + bend) + bend * eps * (x - case.c).abs().clamp(max=8)
        f_error = 8 * eps * (x.abs() + bend * (1 + (x - case.c).abs()))
    else:
        where = place(x, exact.table, case.radius, eps)
        coefficient = exact.table[where.interval].abs()
        moved = where.error.view_as(x)
        rise = (coefficient * where.derivative).sum(1).view_as(x)
        bend = (coefficient * where.second).sum(1).view_as(x)
        slope, slope_error = where.rate * rise, where.rate * (8 * eps * rise + 2 * bend * moved)
        f_error = 8 * eps * (coefficient * where.weight).sum(1).view_as(x) + 2 * rise * moved
    sum_error = (share * f_error).sum(1, keepdim=True) + 8 * eps * (1 + normalizer.abs())
    within("log_normalizer", got[1][used], true[1][used], sum_error[:, 0])
    bound = f_error.gather(1, target) + sum_error
    within("log_prob", got[0][used], true[0][used], bound[:, 0])
    # The smallest may be 0.
    share_error = share * (f_error + sum_error + 8 * eps) + 2 * torch.finfo(dtype).tiny
    term = (torch.zeros_like(share).scatter_(1, target, 1.0) - share).abs()
    upstream = exact.grad[used, None].abs()
    bound = upstream * (share_error * slope + term * slope_error)
    within("grad_logits", got[2][used], true[2][used], bound)
    if exact.table is None:
        return
    bound = (upstream * share_error).reshape(-1, 1) * where.weight
    bound += (upstream * term).reshape(-1, 1) * (
        4 * eps * where.weight + 2 * where.derivative * where.error[:, None]
    )
    if bound.numel():
        bound += 2 * len(batch.target) * upstream.max() * 2.0**-60
    within("grad_table", got[3], true[3], by_interval(where, bound, case.intervals))


# In the processes that each run the code of one instruction set.

MANY_ELEMENTS = PiecewiseCase("elements for two threads and several blocks", shape=(300_001,),
                         intervals=1000, spread=3.0)  # fmt: skip
MANY_LOGITS = MonotoneCase("logits for two threads", rows=301, classes=1003)


def results() -> list[Tensor]:
    """Of one batch for each width of piecewise's table and each kind of function."""
    batches = [piecewise_batch(MANY_ELEMENTS, width, torch.float32) for width in (2, 4)]
    every = [replace(MANY_LOGITS, **options) for _, options in FUNCTIONS]  # type: ignore[arg-type]
    return [
        *(x for batch in batches for x in piecewise_gradients(batch)),
        *(x for case in every for x in monotone_gradients(monotone_batch(case, torch.float32))),
    ]


def check_every_case() -> list[Tensor]:
    """Every case on the CPU, in every dtype; returns the results of larger batches."""
    for case in PIECEWISE_CASES:
        for width in (2, 4):
            for dtype in case.dtypes or DTYPES:
                check_piecewise(case, width, dtype, CPU)
    for monotone_case in MONOTONE_CASES:
        for dtype in (torch.float32, torch.float64):
            for at_once in (False, True):
                check_monotone(monotone_case, dtype, CPU, at_once)
    return results()
