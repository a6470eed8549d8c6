"""The target_log_softmax kernels under emulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.emulation import (
    FLOAT32,
    FLOAT64,
    Array,
    ElementType,
    Kernels,
    LogitFunction,
)
from kernels.logit_cases import (
    BAD_TARGETS,
    MANY,
    MONOTONE_CASES,
    MonotoneCase,
    Rows,
    check_misaligned_rows,
    check_monotone,
    check_spoilt_rows,
    make_rows,
    run_rows,
    table_function,
)

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

INF, NAN = np.inf, np.nan
KINDS = (FLOAT32, FLOAT64)
FUNCTIONS = (
    MonotoneCase("softmax"),
    MonotoneCase("gss", c=-1.5, k=2.5),
    MonotoneCase("plif", intervals=12),
    MonotoneCase("cubic", intervals=12, width=4),
)


def name(value: object) -> str:
    return value.name if isinstance(value, ElementType) else str(value)


def copied(results: tuple[Array | None, ...]) -> list[bytes]:
    return [b"" if array is None else array.tobytes() for array in results]


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in (*MONOTONE_CASES, MANY) for kind in case.kinds],
    ids=name,
)
def test_equals_reference(kernels: Kernels, case: MonotoneCase, kind: ElementType) -> None:
    check_monotone(kernels, case, kind)


@pytest.mark.parametrize("case", MONOTONE_CASES, ids=str)
def test_same_bits_in_every_scheduling_order(kernels: Kernels, case: MonotoneCase) -> None:
    rows = make_rows(case, FLOAT32)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(copied(run_rows(kernels, FLOAT32, rows)))
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize(("width", "classes"), [(2, 33), (4, 33), (2, 1023), (2, 1025)])
def test_same_bits_at_every_alignment(
    kernels: Kernels, kind: ElementType, width: int, classes: int
) -> None:
    check_misaligned_rows(kernels, kind, width, classes)


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("width", [2, 4])
def test_spoilt_rows(kernels: Kernels, kind: ElementType, width: int) -> None:
    check_spoilt_rows(kernels, kind, width)


@pytest.mark.parametrize("kind", KINDS, ids=name)
@pytest.mark.parametrize("classes", [33, 1025])  # a warp and a block for each row
@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_rows_without_a_finite_result(
    kernels: Kernels, case: MonotoneCase, classes: int, kind: ElementType
) -> None:
    """NaN, +inf or nothing but -inf in a row: NaN in that row and in row 0 of the table alone."""
    rows = make_rows(replace(case, rows=8, classes=classes, ignored=0.0), kind)
    logits = rows.logits
    logits[1, 7], logits[2, 30], logits[3, :], logits[4, 3:5] = NAN, INF, -INF, (-INF, NAN)
    results = run_rows(kernels, kind, rows)
    bad = np.isin(np.arange(8), [1, 2, 3, 4])
    assert (np.isnan(results.log_prob) == bad).all()
    assert (np.isnan(results.log_normalizer) == bad).all()
    assert (np.isnan(results.grad) == bad[:, None]).all()
    if results.grad_table is not None:
        assert np.isnan(results.grad_table[0]).all()
        assert np.isfinite(results.grad_table[1:]).all()


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_target_out_of_range_gives_nan(kernels: Kernels, case: MonotoneCase) -> None:
    rows = make_rows(case, FLOAT32)
    rows.target[: len(BAD_TARGETS)] = BAD_TARGETS
    rows.target[6:9] = (-1, 0, 32)
    results = run_rows(kernels, FLOAT32, rows)
    bad = np.arange(9) < 6
    assert (np.isnan(results.log_prob) == bad).all()
    assert (np.isnan(results.grad) == bad[:, None]).all()
    if results.grad_table is not None:
        assert np.isnan(results.grad_table[0]).all()
        assert np.isfinite(results.grad_table[1:]).all()


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_grad_not_finite_spoils_the_whole_table(kernels: Kernels, bad: float) -> None:
    rows = make_rows(FUNCTIONS[2], FLOAT32)
    rows.target[:3] = (5, -1, 7)
    rows.grad[1] = bad  # an ignored row: nothing happens
    results = run_rows(kernels, FLOAT32, rows)
    assert results.grad_table is not None
    assert np.isfinite(results.grad_table).all()
    assert not results.grad[1].any()
    rows.grad[0] = bad
    results = run_rows(kernels, FLOAT32, rows)
    assert results.grad_table is not None
    assert np.isnan(results.grad_table).all()
    assert np.isfinite(results.grad[2]).all()


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
@pytest.mark.parametrize("wrong", [-1e30, 1e30, -60.0, INF, -INF, NAN])
def test_wrong_log_normalizer_writes_nowhere_else(
    kernels: Kernels, case: MonotoneCase, wrong: float
) -> None:
    function, logits, target, grad = make_rows(case, FLOAT32)
    buffer = np.full(logits.size + 8, 12345.0, np.float32)
    moved = buffer[4:-4].reshape(logits.shape)
    moved[:] = logits
    normalizer = np.full(len(logits), wrong, np.float32)
    arguments = (moved, grad.astype(np.float32), target, normalizer)
    kernels.target_log_softmax_backward_(FLOAT32, function, *arguments)
    assert (buffer[[*range(4), *range(-4, 0)]] == 12345).all()
    assert np.isnan(moved[target >= 0]).all() == (not np.isfinite(wrong))


@pytest.mark.parametrize("case", FUNCTIONS, ids=str)
def test_without_the_gradient_of_the_table(kernels: Kernels, case: MonotoneCase) -> None:
    """The gradient of the logits is the same bits."""
    function, logits, target, grad = make_rows(case, FLOAT32)
    logits = FLOAT32.encode(logits)
    _, normalizer = kernels.target_log_softmax(FLOAT32, function, logits, target)
    results = []
    for wanted in (True, False):
        replaced = logits.copy()
        arguments = (replaced, grad.astype(np.float32), target, normalizer)
        grad_table = kernels.target_log_softmax_backward_(FLOAT32, function, *arguments, wanted)
        assert wanted or grad_table is None
        results.append(replaced)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", KINDS, ids=name)
def test_identity_whatever_c(kernels: Kernels, kind: ElementType) -> None:
    """k = 1, a PLIF and a cubic of slope 1 are all the softmax."""
    _, logits, target, grad = make_rows(FUNCTIONS[0], kind)
    knots = np.linspace(-8.0, 8.0, 17)[:-1]
    linear = LogitFunction(table=np.stack([knots, np.ones(16)], 1), radius=8.0)
    cubic = LogitFunction(
        table=np.stack([knots, *np.eye(3)[0][:, None] * np.ones(16)], 1), radius=8.0
    )
    softmax = run_rows(kernels, kind, Rows(LogitFunction(), logits, target, grad))
    for function in (LogitFunction(c=7.0), linear, cubic):
        results = run_rows(kernels, kind, Rows(function, logits, target, grad))
        for got, want in zip(results[:3], softmax[:3], strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=200 * kind.unit)


@pytest.mark.parametrize(
    ("function", "shift"),
    [
        (LogitFunction(), -12288),
        (LogitFunction(), 12288),
        (LogitFunction(-1.5, 2.5), 12288),
    ],
    ids=["softmax-below", "softmax-above", "gss-above"],
)
def test_large_logits_are_as_good_as_small_ones(
    kernels: Kernels, function: LogitFunction, shift: int
) -> None:
    """Logits moved by what float32 holds exactly, to where f has slope 1: nothing changes."""
    _, logits, target, grad = make_rows(FUNCTIONS[0], FLOAT32)
    logits = np.rint(logits * 64) / 64
    small = run_rows(kernels, FLOAT32, Rows(LogitFunction(), logits, target, grad))
    large = run_rows(kernels, FLOAT32, Rows(function, logits + shift, target, grad))
    np.testing.assert_allclose(large.grad, small.grad, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(large.log_prob, small.log_prob, rtol=1e-6)


@pytest.mark.parametrize("case", FUNCTIONS[2:], ids=str)
def test_sums_of_grad_of_the_table(kernels: Kernels, case: MonotoneCase) -> None:
    """w_0 = 1, so the sums of column 0 are sums of g, which cancel within each row."""
    rows = make_rows(case, FLOAT64)
    results = run_rows(kernels, FLOAT64, rows)
    assert results.grad_table is not None
    assert abs(results.grad_table[:, 0].sum()) < 1e-13 * np.abs(rows.grad).sum()


def test_increasing_table() -> None:
    """What the cases rest on: the functions of the tables increase."""
    for width in (2, 4):
        table = table_function(FLOAT64, 40, width, 20.0).table
        assert table is not None
        u = np.linspace(0, 1, 11)
        value = sum(table[:, m, None] * u**m for m in range(width))
        assert (np.diff(np.asarray(value).reshape(-1)) > -1e-9).all()
