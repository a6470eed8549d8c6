"""Functions of a logit, elements and rows for piecewise and target_log_softmax, and what the ops
must give on them, computed in long double.

`check_piecewise` and `check_monotone` run one case and compare; they serve the tests and
sanitized.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ops.bounds import Checked, close

from kernels.emulation import (
    BFLOAT16,
    ELEMENT_TYPES,
    FLOAT32,
    FLOAT64,
    Array,
    ElementType,
    Kernels,
    LogitFunction,
    unit_of_sums,
)

EXACT = np.longdouble
BOTH = (FLOAT32, BFLOAT16)
WIDE = (FLOAT32, FLOAT64)


def table_function(
    kind: ElementType, intervals: int, width: int, radius: float, seed: int = 0
) -> LogitFunction:
    """An increasing function of random slopes: a PLIF, or a cubic with the knots of one."""
    random = np.random.default_rng(seed)
    rise = np.log1p(np.exp(random.normal(0.54, 1.0, intervals))) * (2 * radius / intervals)
    value = np.concatenate([[0.0], np.cumsum(rise)])[:-1]
    if width == 2:
        table = np.stack([value, rise], 1)
    else:
        # Harmonic means keep a Hermite interpolation increasing (Fritsch and Butland, 1984).
        inner = 2 / (1 / rise[:-1] + 1 / rise[1:])
        begin = np.concatenate([rise[:1], inner])
        end = np.concatenate([inner, rise[-1:]])
        table = np.stack([value, begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise], 1)
    return LogitFunction(table=table.astype(kind.sums).astype(np.float64), radius=radius)


class Evaluated(NamedTuple):
    """f at some elements. `*_terms`: magnitude of what sums up to it."""

    value: Array
    value_terms: Array
    derivative: Array
    derivative_terms: Array
    interval: Array | None = None
    weight: Array | None = None  # [..., width], derivative of f by table[interval]


def position(kind: ElementType, function: LogitFunction, x: Array) -> Array:
    """x rate + K / 2, rate rounded as the op rounds it."""
    assert function.table is not None
    intervals = len(function.table)
    rate = kind.sums(intervals / (2 * function.radius))
    return x.astype(EXACT) * EXACT(rate) + EXACT(intervals) / 2


def evaluate(kind: ElementType, function: LogitFunction, x: Array) -> Evaluated:
    if function.table is None:
        x = x.astype(EXACT)
        d = x - EXACT(kind.sums(function.c))
        excess = EXACT(kind.sums(function.k - 1))
        log_sigmoid = -np.logaddexp(EXACT(0), -d)
        terms = np.abs(x) + np.abs(excess * log_sigmoid) + np.abs(excess)
        slope = 1 + excess * np.exp(-np.logaddexp(EXACT(0), d))
        return Evaluated(x + excess * log_sigmoid, terms, slope, 1 + np.abs(excess) + 0 * x)
    t = position(kind, function, x)
    intervals, width = function.table.shape
    interval = np.clip(np.floor(t), 0, intervals - 1).astype(np.int64)
    u = t - interval
    inside = np.clip(u, 0, 1)
    rate = EXACT(kind.sums(intervals / (2 * function.radius)))
    coefficient = function.table.astype(EXACT)[interval]
    powers = np.arange(width)
    lower = np.maximum(powers - 1, 0)
    change = powers * inside[..., None] ** lower  # derivative of u^m
    weight = inside[..., None] ** powers + change * (u - inside)[..., None]
    weight_terms = inside[..., None] ** powers + change * np.abs(u - inside)[..., None]
    return Evaluated(
        (coefficient * weight).sum(-1),
        (np.abs(coefficient) * weight_terms).sum(-1),
        rate * (coefficient * change).sum(-1),
        rate * (np.abs(coefficient) * change).sum(-1),
        interval,
        weight,
    )


def table_sums(function: LogitFunction, at: Evaluated, grad: Array, terms: Array) -> Checked:
    """Sums over elements of grad * weight by interval; `terms` as magnitude of grad."""
    assert function.table is not None
    assert at.interval is not None
    assert at.weight is not None
    sums = Checked.zeros(*function.table.shape)
    where = at.interval.reshape(-1)
    width = function.table.shape[1]
    np.add.at(sums.value, where, (grad[..., None] * at.weight).reshape(-1, width))
    np.add.at(sums.terms, where, (terms[..., None] * np.abs(at.weight)).reshape(-1, width))
    return sums


def draw(
    kind: ElementType,
    function: LogitFunction,
    shape: tuple[int, ...],
    scale: float,
    seed: int = 1,
) -> Array:
    """Normal elements, exact in the type, none so near to a knot that rounding moves it across."""
    random = np.random.default_rng(seed)
    x = np.empty(shape)
    bad = np.ones(shape, np.bool_)
    while bad.any():
        x[bad] = kind.decode(kind.encode(scale * random.standard_normal(int(bad.sum()))))
        if function.table is None:
            break
        t = position(kind, function, x)
        bad = np.abs(t - np.rint(t)) < 4 * unit_of_sums(kind) * (np.abs(t) + 1)
    return x


@dataclass(frozen=True)
class PiecewiseCase:
    why: str
    elements: int
    intervals: int
    width: int
    radius: float = 20.0
    scale: float = 8.0
    kinds: tuple[ElementType, ...] = ELEMENT_TYPES

    def __str__(self) -> str:
        return self.why.replace(" ", "-")


PLIF_CASES = (
    PiecewiseCase("one interval", 300, 1, 2, radius=2, scale=3),
    PiecewiseCase("one cubic", 300, 1, 4, radius=2, scale=3),
    PiecewiseCase("one element", 1, 3, 2),
    PiecewiseCase("two intervals, both ends", 515, 2, 2, radius=1, scale=2),
    PiecewiseCase("sums in shared memory", 3001, 12, 2),
    PiecewiseCase("sums in shared memory, cubic", 3001, 9, 4),
    PiecewiseCase("sums in more than 48 KiB of shared memory", 8192, 4000, 2, kinds=(BFLOAT16,)),
    PiecewiseCase("sums in global memory", 777, 1000, 2),
    PiecewiseCase("sums in global memory, cubic", 777, 1000, 4),
    PiecewiseCase("the number of intervals of the study", 1500, 100_000, 2, kinds=BOTH),
    PiecewiseCase("as many cubics", 1500, 100_000, 4, kinds=(FLOAT32,)),
    PiecewiseCase("nearly all outside", 2000, 10, 2, radius=0.25),
    PiecewiseCase("nearly all outside, cubic", 2000, 10, 4, radius=0.25),
)
# More than the threads of a grid take at once.
LONG = PiecewiseCase("several steps of the grid", 2 * 1024 * 256 + 77, 16, 2, kinds=(FLOAT64,))


def make_piecewise(case: PiecewiseCase, kind: ElementType) -> tuple[LogitFunction, Array, Array]:
    """Function, exact input, and exact grad of either sign over three orders of magnitude."""
    function = table_function(kind, case.intervals, case.width, case.radius)
    x = draw(kind, function, (case.elements,), case.scale)
    random = np.random.default_rng(2)
    grad = random.standard_normal(case.elements) * 10.0 ** random.uniform(-2, 1, case.elements)
    return function, x, kind.decode(kind.encode(grad))


def check_piecewise(kernels: Kernels, case: PiecewiseCase, kind: ElementType) -> None:
    """Compares output and both gradients with the formula."""
    function, x, grad = make_piecewise(case, kind)
    at = evaluate(kind, function, x)
    unit = unit_of_sums(kind)
    output = kernels.piecewise(kind, function, kind.encode(x))
    true = Checked(at.value, at.value_terms)
    close("output", kind.decode(output), true, 0, unit, kind.unit, kind.tiny)

    grad_input, grad_table = kernels.piecewise_backward(
        kind, function, kind.encode(grad), kind.encode(x)
    )
    true = Checked(grad * at.derivative, np.abs(grad) * at.derivative_terms)
    close("grad_input", kind.decode(grad_input), true, 0, unit, kind.unit, kind.tiny)
    true = table_sums(function, at, grad, np.abs(grad))
    # The quantum of the integers, once for each element.
    quantum = len(x) ** 2 * np.abs(grad).max() * 2.0**-61
    close("grad_table", grad_table, true, 0, unit, unit, quantum)


@dataclass(frozen=True)
class MonotoneCase:
    """Rows of logits. `c`, `k`, or a table where `intervals` is given."""

    why: str
    rows: int = 9
    classes: int = 33
    c: float = 0.0
    k: float = 1.0
    intervals: int = 0
    width: int = 2
    radius: float = 20.0
    scale: float = 3.0
    shift: float = 0.0
    impossible: float = 0.0  # share of the logits that are -inf
    ignored: float = 0.2
    kinds: tuple[ElementType, ...] = WIDE

    def __str__(self) -> str:
        return self.why.replace(" ", "-")

    def function(self, kind: ElementType) -> LogitFunction:
        if self.intervals:
            return table_function(kind, self.intervals, self.width, self.radius)
        return LogitFunction(self.c, self.k)


GSS = {"c": -1.5, "k": 2.5}
MONOTONE_CASES = (
    MonotoneCase("softmax", impossible=0.1),
    MonotoneCase("sigsoftmax", k=2.0),
    MonotoneCase("generalised sigsoftmax", **GSS, impossible=0.1),
    MonotoneCase("k below one", c=0.5, k=0.3, impossible=0.1),
    MonotoneCase("plif", intervals=300, impossible=0.1),
    MonotoneCase("cubic", intervals=40, width=4, impossible=0.1),
    MonotoneCase("plif, sums in shared memory", rows=7, classes=90, intervals=5),
    MonotoneCase("cubic, sums in shared memory", rows=7, classes=90, intervals=3, width=4),
    MonotoneCase("plif, one interval", intervals=1, radius=1.0, scale=2.0),
    MonotoneCase("cubic, mostly outside", intervals=4, width=4, radius=0.5, scale=2.0),
    MonotoneCase("plif of the study", rows=3, classes=400, intervals=100_000, kinds=(FLOAT32,)),
    MonotoneCase("one class", classes=1),
    MonotoneCase("one class, plif", classes=1, intervals=7),
    MonotoneCase("two classes, one row", rows=1, classes=2, **GSS, ignored=0.0),
    MonotoneCase("several steps of a block", rows=4, classes=5003),
    MonotoneCase("several steps of a block, plif", rows=4, classes=5003, intervals=50),
    MonotoneCase("aligned rows", rows=4, classes=64, **GSS),
    MonotoneCase("logits of order 1e4", scale=3e3, shift=1e4),
    MonotoneCase("logits of order 1e4, both signs, sigsoftmax", scale=1e4, k=2.0),
    MonotoneCase("equal logits of order 1e4", scale=2.0, shift=1e4, **GSS),
    MonotoneCase("logits of order -1e4", scale=2.0, shift=-1e4, **GSS),
    MonotoneCase("logits far outside the table", scale=2.0, shift=1e3, intervals=10),
    MonotoneCase("all rows ignored", ignored=1.0, intervals=10),
    MonotoneCase("zero rows", rows=0, intervals=10),
    MonotoneCase("31 classes", classes=31, k=2.0),
    MonotoneCase("32 classes, plif", classes=32, intervals=40),
    MonotoneCase("256 classes", classes=256, impossible=0.1),
    MonotoneCase("256 classes, plif", classes=256, intervals=40),
    MonotoneCase("most classes of a warp in float64", rows=6, classes=512, **GSS),
    MonotoneCase("513 classes, cubic", rows=6, classes=513, intervals=9, width=4),
    MonotoneCase("1023 classes", rows=6, classes=1023, impossible=0.1, **GSS),
    MonotoneCase("most classes of a warp in float32", rows=6, classes=1024, intervals=40),
    MonotoneCase("1025 classes", rows=6, classes=1025, impossible=0.1, **GSS),
    MonotoneCase("1025 classes, plif", rows=6, classes=1025, intervals=40),
    MonotoneCase("256 logits of order 1e4", classes=256, scale=3e3, shift=1e4, k=2.0),
)  # fmt: skip
# More rows than blocks that sum.
MANY = MonotoneCase("several rows for each block", rows=1500, classes=3, intervals=20)


class Rows(NamedTuple):
    function: LogitFunction
    logits: Array  # exact
    target: Array
    grad: Array


def make_rows(case: MonotoneCase, kind: ElementType) -> Rows:
    function = case.function(kind)
    shape = (case.rows, case.classes)
    logits = draw(kind, function, shape, case.scale)
    random = np.random.default_rng(3)
    logits = kind.decode(kind.encode(logits + case.shift))
    target = random.integers(0, case.classes, case.rows)
    logits[random.random(shape) < case.impossible] = -np.inf
    if case.rows > 2 and case.classes > 3:
        logits[0, target[0]] = -np.inf if case.impossible else logits[0, target[0]]
        logits[1, target[1]] = logits[1].max() + 4 * case.scale
        logits[1] = kind.decode(kind.encode(logits[1]))
    ignored = random.random(case.rows) < case.ignored
    if case.ignored < 1:
        ignored[:2] = False
    target[ignored] = -1
    grad = random.standard_normal(case.rows) * 10.0 ** random.uniform(-2, 1, case.rows)
    return Rows(function, logits, target, kind.decode(kind.encode(grad)))


class RowTruth(NamedTuple):
    log_prob: Checked
    log_normalizer: Checked
    grad: Checked
    grad_table: Checked | None


def true_rows(kind: ElementType, rows: Rows) -> RowTruth:
    """Terms carry the error of f into p, as a share of p."""
    function, logits, target, upstream = rows
    possible = logits > -np.inf
    at = evaluate(kind, function, np.where(possible, logits, 0.0))
    value = np.where(possible, at.value, EXACT(-np.inf))
    largest = value.max(1, keepdims=True)
    log_sum = np.log(np.exp(value - largest).sum(1, keepdims=True))
    used = target >= 0
    index = np.maximum(target, 0)[:, None]
    chosen = np.take_along_axis(value, index, 1)
    error = np.where(possible, at.value_terms, 0).max(1, keepdims=True)
    log_prob = np.where(used[:, None], (chosen - largest) - log_sum, 0)
    log_normalizer = np.where(used[:, None], largest + log_sum, 0)
    terms = error + 4 + np.where(np.isfinite(log_prob), np.abs(log_prob), 0)

    one = np.arange(logits.shape[1]) == index
    # A float32 log_normalizer of magnitude up to 64, whose rounding is an error of p.
    p_error = error + 4 + np.minimum(np.abs(log_normalizer), 64)
    p = np.exp(value - largest - log_sum)
    active = possible & used[:, None]
    g = np.where(active, upstream[:, None] * (one - p), 0)
    g_terms = np.where(active, np.abs(upstream)[:, None] * (one + p * p_error), 0)
    return RowTruth(
        Checked(log_prob[:, 0], terms[:, 0]),
        Checked(log_normalizer[:, 0], (terms + np.abs(log_normalizer))[:, 0]),
        Checked(g * at.derivative, g_terms * at.derivative_terms),
        None if function.table is None else table_sums(function, at, g, g_terms),
    )


class RowResults(NamedTuple):
    log_prob: Array
    log_normalizer: Array
    grad: Array
    grad_table: Array | None


def run_rows(kernels: Kernels, kind: ElementType, rows: Rows) -> RowResults:
    """Both launchers, backward from the log_normalizer of forward."""
    function, logits, target, grad = rows
    stored = kind.encode(logits)
    log_prob, log_normalizer = kernels.target_log_softmax(kind, function, stored, target)
    arguments = (stored, kind.encode(grad), target, log_normalizer)
    grad_table = kernels.target_log_softmax_backward_(kind, function, *arguments)
    return RowResults(log_prob, log_normalizer, stored, grad_table)


def check_monotone(kernels: Kernels, case: MonotoneCase, kind: ElementType) -> None:
    """Compares all outputs with the formulas; -inf is met exactly."""
    rows = make_rows(case, kind)
    results, true = run_rows(kernels, kind, rows), true_rows(kind, rows)
    unit = unit_of_sums(kind)
    never = true.log_prob.value == -np.inf
    assert (results.log_prob[never] == -np.inf).all()
    finite = Checked(true.log_prob.value[~never], true.log_prob.terms[~never])
    close("log_prob", results.log_prob[~never], finite, 8, unit, unit, 0.0)
    close("log_normalizer", results.log_normalizer, true.log_normalizer, 8, unit, unit, 0.0)
    tiny = 4 * float(np.finfo(kind.storage).smallest_subnormal)
    close("grad", results.grad, true.grad, 8, unit, unit, tiny)
    assert (results.grad[rows.logits == -np.inf] == 0).all()
    assert (results.grad[rows.target < 0] == 0).all()
    if true.grad_table is None:
        assert results.grad_table is None
        return
    assert results.grad_table is not None
    quantum = rows.logits.size * max(case.rows, 1) * np.abs(rows.grad).max(initial=0) * 2.0**-60
    close("grad_table", results.grad_table, true.grad_table, 8, unit, unit, quantum)


def check_extreme_elements(kernels: Kernels, kind: ElementType, width: int) -> None:
    """No element, no table and no radius leads outside the table; a NaN element spoils row 0."""
    limit = {"float16": 65504.0, "bfloat16": 3.0e38, "float32": 3.4e38, "float64": 1.7e308}
    x = np.array([0.0, 1e-30, limit[kind.name], np.nan, np.inf, 2.0, 1.0])
    stored = kind.encode(np.concatenate([x, -x]))
    for radius in (1.0, 1e-30, 1e30):
        table = np.full((5, width), [np.nan, np.inf, -np.inf, 1.0][:width])
        function = LogitFunction(table=table, radius=radius)
        kernels.piecewise(kind, function, stored)
        grad = kind.encode(np.ones(len(stored)))
        _, grad_table = kernels.piecewise_backward(kind, function, grad, stored)
        assert np.isnan(grad_table[0]).all()


BAD_TARGETS = (-2, -(2**63), 33, 2**31, 2**62, 2**63 - 1)


def check_spoilt_rows(kernels: Kernels, kind: ElementType, width: int) -> None:
    """Targets out of range, logits and log_normalizer that no forward pass gives: NaN in their rows
    and in row 0 of the table, nothing elsewhere."""
    case = MonotoneCase("", rows=12, intervals=12, width=width, ignored=0.0)
    function, logits, target, grad = make_rows(case, kind)
    target[: len(BAD_TARGETS)] = BAD_TARGETS
    target[6:10] = (-1, 0, 32, 4)
    log_prob, log_normalizer = kernels.target_log_softmax(
        kind, function, kind.encode(logits), target
    )
    bad = np.arange(12) < 6
    assert (np.isnan(log_prob) == bad).all()
    log_normalizer[9:] = (np.nan, 1e30, -1e30)
    bad[9] = True
    buffer = np.full(logits.size + 8, 12345.0, kind.storage)
    inside = buffer[4:-4].reshape(logits.shape)
    inside[:] = logits
    arguments = (inside, kind.encode(grad), target, log_normalizer)
    grad_table = kernels.target_log_softmax_backward_(kind, function, *arguments)
    assert (np.isnan(inside) == bad[:, None]).all()
    assert (buffer[:4] == 12345).all()
    assert (buffer[-4:] == 12345).all()
    assert grad_table is not None
    assert np.isnan(grad_table[0]).all()
    assert np.isfinite(grad_table[1:]).all()


def check_misaligned_rows(
    kernels: Kernels, kind: ElementType, width: int, classes: int = 33
) -> None:
    """Rows that begin at any element: the same bits."""
    case = MonotoneCase("", rows=5, classes=classes, intervals=12, width=width)
    function, logits, target, grad = make_rows(case, kind)
    results = set()
    for shift in range(4):
        buffer = kind.garbage(logits.size + shift)
        moved = buffer[shift:].reshape(logits.shape)
        moved[:] = logits
        log_prob, log_normalizer = kernels.target_log_softmax(kind, function, moved, target)
        arguments = (moved, kind.encode(grad), target, log_normalizer)
        grad_table = kernels.target_log_softmax_backward_(kind, function, *arguments)
        assert grad_table is not None
        arrays = (log_prob, log_normalizer, moved, grad_table)
        results.add(b"".join(array.tobytes() for array in arrays))
    assert len(results) == 1
