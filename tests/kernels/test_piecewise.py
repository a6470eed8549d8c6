"""The piecewise kernels under emulation."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from cuda_emu.library import ORDERS
from ops.bounds import Checked, close

from kernels.emulation import (
    ELEMENT_TYPES,
    FLOAT32,
    FLOAT64,
    Array,
    ElementType,
    Kernels,
    LogitFunction,
)
from kernels.logit_cases import (
    EXACT,
    LONG,
    PLIF_CASES,
    PiecewiseCase,
    check_extreme_elements,
    check_piecewise,
    draw,
    evaluate,
    make_piecewise,
    table_function,
)

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

INF, NAN = np.inf, np.nan
# Knots at -2, -1, 0, 1, 2; the last interval is flat.
LINEAR = LogitFunction(table=np.array([[0.0, 1], [1, 2], [3, 0.5], [3.5, 0]]), radius=2.0)
# u^3 on the left of 0, 1 + 2 u - u^2 on the right.
CUBIC = LogitFunction(table=np.array([[0.0, 0, 0, 1], [1, 2, -1, 0]]), radius=1.0)


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in (*PLIF_CASES, LONG) for kind in case.kinds],
    ids=lambda value: value.name if isinstance(value, ElementType) else str(value),
)
def test_equals_reference(kernels: Kernels, case: PiecewiseCase, kind: ElementType) -> None:
    check_piecewise(kernels, case, kind)


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_knots_and_beyond(kernels: Kernels, kind: ElementType) -> None:
    """Every number here is exact in every type."""
    x = np.array([-INF, -4, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 8, NAN])
    output = kernels.piecewise(kind, LINEAR, kind.encode(x))
    want = [-INF, -2, 0, 0.5, 1, 2, 3, 3.25, 3.5, 3.5, 3.5, 3.5, NAN]
    np.testing.assert_array_equal(kind.decode(output), want)
    grad = np.array([0.0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 0.0])
    grad_input, grad_table = kernels.piecewise_backward(
        kind, LINEAR, kind.encode(grad[:-1]), kind.encode(x[:-1])
    )
    slope = [1, 1, 1, 1, 2, 2, 0.5, 0.5, 0, 0, 0, 0]
    np.testing.assert_array_equal(kind.decode(grad_input), grad[:-1] * slope)
    want_table = [
        [1 + 2 + 4, 1 * -2 + 4 * 0.5],
        [8 + 16, 16 * 0.5],
        [32 + 64, 64 * 0.5],
        [128 + 256 + 512 + 1024, 256 * 0.5 + 512 + 1024 * 7],
    ]
    np.testing.assert_array_equal(grad_table, want_table)


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_knots_and_beyond_cubic(kernels: Kernels, kind: ElementType) -> None:
    x = np.array([-INF, -3, -1, -0.5, 0, 0.5, 1, 3, INF, NAN])
    output = kernels.piecewise(kind, CUBIC, kind.encode(x))
    want = [NAN, 0, 0, 0.125, 1, 1.75, 2, 2, NAN, NAN]  # slope 0 at both ends
    np.testing.assert_array_equal(kind.decode(output), want)
    grad = np.array([1.0, 2, 4, 8, 16, 32])
    grad_input, grad_table = kernels.piecewise_backward(
        kind, CUBIC, kind.encode(grad), kind.encode(x[2:8])
    )
    slope = [0, 0.75, 2, 1, 0, 0]
    np.testing.assert_array_equal(kind.decode(grad_input), grad * slope)
    want_table = [
        [1 + 2, 2 * 0.5, 2 * 0.25, 2 * 0.125],
        [4 + 8 + 16 + 32, 4 + 16 + 32 * 3, 2 + 16 + 32 * 5, 1 + 16 + 32 * 7],
    ]
    np.testing.assert_array_equal(grad_table, want_table)


@pytest.mark.parametrize("width", [2, 4])
def test_infinite_input(kernels: Kernels, width: int) -> None:
    """Infinity in the sums of that end; nothing where grad is 0."""
    table = np.ones((3, width))
    function = LogitFunction(table=table, radius=1.0)
    x = np.array([-INF, 0.0, INF], np.float32)
    output = kernels.piecewise(FLOAT32, function, x)
    np.testing.assert_array_equal(output[[0, 2]], [-INF, INF])
    _, grad_table = kernels.piecewise_backward(FLOAT32, function, np.ones_like(x), x)
    low, high = [-INF, 0, 0][: width - 1], [INF, INF, INF][: width - 1]
    np.testing.assert_array_equal(grad_table[0], [1, *low])
    np.testing.assert_array_equal(grad_table[2], [1, *high])
    assert np.isfinite(grad_table[1]).all()
    _, grad_table = kernels.piecewise_backward(FLOAT32, function, np.float32([0, 1, 0]), x)
    np.testing.assert_array_equal(grad_table[[0, 2]], 0)


@pytest.mark.parametrize("case", PLIF_CASES, ids=str)
def test_same_bits_in_every_scheduling_order(kernels: Kernels, case: PiecewiseCase) -> None:
    kind = case.kinds[0]
    function, x, grad = make_piecewise(case, kind)
    values, upstream = kind.encode(x), kind.encode(grad)
    results = set()
    for order in ORDERS:
        kernels.set_order(*order)
        outputs = kernels.piecewise_backward(kind, function, upstream, values)
        results.add(tuple(output.tobytes() for output in outputs))
    assert len(results) == 1


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_same_bits_at_every_alignment(kernels: Kernels, kind: ElementType) -> None:
    case = PiecewiseCase("", 1001, 10, 4, radius=4.0)
    function, x, grad = make_piecewise(case, kind)
    results = set()
    for shift in range(3):
        outputs = []
        for array in (kind.encode(x), kind.encode(grad)):
            buffer = kind.garbage(len(array) + shift)
            buffer[shift:] = array
            outputs.append(buffer[shift:])
        values, upstream = outputs
        assert (values.ctypes.data % 16 == 0) == (shift * values.itemsize % 16 == 0)
        output = kernels.piecewise(kind, function, values)
        gradients = kernels.piecewise_backward(kind, function, upstream, values)
        results.add(tuple(array.tobytes() for array in (output, *gradients)))
    assert len(results) == 1


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT64], ids=lambda kind: kind.name)
def test_sums_inside_do_not_depend_on_the_order_of_elements(
    kernels: Kernels, kind: ElementType
) -> None:
    function, x, grad = make_piecewise(PiecewiseCase("", 2000, 10, 4, scale=4.0), kind)
    random = np.random.default_rng(5)
    tables = set()
    for _ in range(3):
        order = random.permutation(len(x))
        _, table = kernels.piecewise_backward(
            kind, function, kind.encode(grad[order]), x[order].astype(kind.storage)
        )
        tables.add(table.tobytes())
    assert len(tables) == 1


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_grad_not_finite_spoils_the_whole_table(
    kernels: Kernels, kind: ElementType, bad: float
) -> None:
    function, x, grad = make_piecewise(PiecewiseCase("", 700, 10, 2), kind)
    grad[[3, 500]] = bad, 1e4
    grad_input, table = kernels.piecewise_backward(
        kind, function, kind.encode(grad), kind.encode(x)
    )
    assert np.isnan(table).all()
    assert np.isfinite(np.delete(kind.decode(grad_input), 3)).all()


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("upstream", [1.0, 0.0])
def test_nan_input_spoils_the_first_interval(
    kernels: Kernels, kind: ElementType, width: int, upstream: float
) -> None:
    function, x, grad = make_piecewise(PiecewiseCase("", 700, 10, width), kind)
    x[300], grad[300] = NAN, upstream
    grad_input, table = kernels.piecewise_backward(
        kind, function, kind.encode(grad), kind.encode(x)
    )
    assert np.isnan(table[0]).all()
    assert np.isfinite(table[1:]).all()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(kind.decode(grad_input))), [300])


@pytest.mark.parametrize("kind", [FLOAT32, FLOAT64], ids=lambda kind: kind.name)
@pytest.mark.parametrize("exponent", [-1.0, 0.0, 1.0])
def test_grad_of_any_magnitude(kernels: Kernels, kind: ElementType, exponent: float) -> None:
    """The quantum follows the largest grad, from the smallest subnormal to the largest number."""
    limits = np.finfo(kind.storage)
    size = {-1.0: float(limits.smallest_subnormal), 0.0: 1.0, 1.0: float(limits.max) / 64}[exponent]
    x = np.full(40, 0.5)
    grad = np.full(40, size)
    _, table = kernels.piecewise_backward(kind, LINEAR, kind.encode(grad), kind.encode(x))
    assert table[2, 0] == kind.sums(40 * size)
    assert table[2, 1] == kind.sums(20 * size)


def sampled(size: int) -> Array:
    """Which elements of a float64 grad set the quantum, as sample_begin of piecewise.cu has it."""
    places, run = 2048, 64
    place = np.arange(places)
    spread = (place * 2654435761) % 2**32
    spread ^= spread >> 15
    begin = place * (size // places) + (spread / 2**32 * (size // places - run)).astype(np.int64)
    inside = np.zeros(size, np.bool_)
    inside[(begin // 2 * 2)[:, None] + np.arange(run)] = True
    return inside


LARGE = 2**18 + 5  # twice the sample
LATE = np.flatnonzero(~sampled(LARGE))


class LargeCase(NamedTuple):
    grad: Array
    intervals: int = 6
    width: int = 2
    scale: float = 4.0


def late_case(name: str) -> LargeCase:
    random = np.random.default_rng(7)
    usual = random.standard_normal(LARGE)
    if name == "one outlier near the end":
        usual[LATE[-3]] = 2.0**90
        return LargeCase(usual)
    if name == "some outliers, cubic":
        usual[random.choice(LATE, 500, replace=False)] *= 1e3
        return LargeCase(usual, width=4)
    if name == "zero in the whole sample":
        usual[sampled(LARGE)] = 0
        return LargeCase(usual)
    if name == "one element that is not zero":
        only = np.zeros(LARGE)
        only[LATE[1000]] = np.finfo(np.float64).smallest_subnormal
        return LargeCase(only)
    if name == "sixty orders of magnitude":
        return LargeCase(usual * 10.0 ** random.uniform(-30, 30, LARGE))
    assert name == "one interval, subnormal"
    return LargeCase(usual * 2.0**-1060, intervals=1, scale=2.0)


@pytest.mark.parametrize(
    "name",
    [
        "one outlier near the end",
        "some outliers, cubic",
        "zero in the whole sample",
        "one element that is not zero",
        "sixty orders of magnitude",
        "one interval, subnormal",
    ],
)
def test_grad_larger_than_the_sample(kernels: Kernels, name: str) -> None:
    """Each error is half a quantum for each element: of N max |grad| over the sample for those up
    to that maximum, of N max |grad| for the others; either 2^-61 of it."""
    grad, intervals, width, scale = late_case(name)
    function = table_function(FLOAT64, intervals, width, 20.0)
    x = np.clip(draw(FLOAT64, function, (LARGE,), scale), -19.9, 19.9)
    at = evaluate(FLOAT64, function, x)
    assert at.interval is not None
    grad_input, table = kernels.piecewise_backward(FLOAT64, function, grad, x)
    derivative = Checked(grad * at.derivative, np.abs(grad) * at.derivative_terms)
    close("grad_input", grad_input, derivative, 0, 2.0**-53, 2.0**-53, 2.0**-1073)
    limit = np.abs(grad[sampled(LARGE)]).max()
    late = np.abs(grad) > limit
    counts = [np.bincount(at.interval[which], minlength=intervals) for which in (~late, late)]
    quanta = [LARGE * EXACT(size) * EXACT(2.0) ** -61 for size in (limit, np.abs(grad).max())]
    bound = (counts[0] * quanta[0] + counts[1] * quanta[1]) / 2
    assert at.weight is not None
    true, terms = np.zeros((2, intervals, width), EXACT)
    np.add.at(true, at.interval, grad[:, None] * at.weight)
    np.add.at(terms, at.interval, np.abs(grad[:, None] * at.weight))
    error = np.abs(table - true)
    assert (error <= bound[:, None] + 4 * 2.0**-53 * terms + 2.0**-1074).all()


@pytest.mark.parametrize("bad", [INF, NAN])
def test_grad_not_finite_beside_the_sample(kernels: Kernels, bad: float) -> None:
    grad = np.ones(LARGE)
    grad[LATE[5]] = bad
    _, table = kernels.piecewise_backward(FLOAT64, LINEAR, grad, np.full(LARGE, 0.5))
    assert np.isnan(table).all()


def test_same_bits_with_late_elements(kernels: Kernels) -> None:
    """More late elements than the list of a block holds, few, and none."""
    x = np.linspace(-1.9, 1.9, LARGE)
    grad = np.random.default_rng(8).standard_normal(LARGE)
    grad[LATE[:20_000]] *= 1e3
    grad[LATE[-40:]] *= 1e6
    tables = set()
    for order in (ORDERS[1], ORDERS[2]):
        kernels.set_order(*order)
        tables.add(kernels.piecewise_backward(FLOAT64, LINEAR, grad, x)[1].tobytes())
    assert len(tables) == 1


def test_sample_is_spread_over_the_whole_array() -> None:
    share = sampled(LARGE).reshape(-1)[: LARGE // 16 * 16].reshape(16, -1).mean(1)
    assert (np.abs(share - 1 / 2) < 0.01).all()


def test_cancellation_is_exact(kernels: Kernels) -> None:
    """The sums are integers: what cancels leaves nothing, and a small rest stays."""
    function = LINEAR
    random = np.random.default_rng(6)
    grad = random.standard_normal(500).astype(np.float32)
    grad = np.concatenate([grad, -grad, np.float32([1e-9])])
    x = np.full(len(grad), 0.25, np.float32)
    _, table = kernels.piecewise_backward(FLOAT32, function, grad, x)
    assert table[2, 0] == pytest.approx(math.fsum(grad.astype(np.float64)), rel=1e-6)


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_zero_grad_and_no_elements(kernels: Kernels, kind: ElementType) -> None:
    x = draw(kind, LINEAR, (300,), 3.0)
    grad_input, table = kernels.piecewise_backward(
        kind, LINEAR, kind.encode(np.zeros(300)), kind.encode(x)
    )
    assert not kind.decode(grad_input).any()
    assert not table.any()
    none = kind.garbage(0)
    assert kernels.piecewise(kind, LINEAR, none).shape == (0,)
    grad_input, table = kernels.piecewise_backward(kind, LINEAR, none, none)
    assert grad_input.shape == (0,)
    assert not table.any()


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("width", [2, 4])
def test_extreme_elements_and_tables(kernels: Kernels, kind: ElementType, width: int) -> None:
    check_extreme_elements(kernels, kind, width)


@pytest.mark.parametrize(("intervals", "width"), [(3057, 2), (3072, 2), (1529, 4), (1536, 4)])
def test_sums_that_leave_no_room_for_static_shared_memory(
    kernels: Kernels, intervals: int, width: int
) -> None:
    """Less than 48 KiB of dynamic shared memory, more with the static bytes of the kernel."""
    function = table_function(FLOAT32, intervals, width, 20.0)
    values = np.zeros(2**22, np.float32)
    grad_input, grad_table = kernels.piecewise_backward(
        FLOAT32, function, np.ones_like(values), values
    )
    assert (grad_input == grad_input[0]).all()
    assert grad_table[:, 0].sum() == len(values)
