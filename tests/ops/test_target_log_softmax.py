"""torch.ops.hstree.target_log_softmax, and its gradient in two steps and at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstree.ops import target_log_softmax
from hstree.ops.target_log_softmax import log_softmax
from ops.cases import BACKEND, name_of, same_bits, strided, threads
from ops.logit_function_cases import (
    FUNCTIONS,
    MANY_LOGITS,
    MONOTONE_CASES,
    SHAPES,
    MonotoneBatch,
    MonotoneCase,
    check_bias,
    check_low_rows,
    check_monotone,
    increasing_table,
    monotone_batch,
    monotone_gradients,
    monotone_reference,
    monotone_value,
)

forward = torch.ops.hstree.target_log_softmax
backward_ = torch.ops.hstree.target_log_softmax_backward_

USUAL = [MonotoneCase(name, **options) for name, options in FUNCTIONS]  # type: ignore[arg-type]
SMALL = [
    MonotoneCase(name, rows=5, classes=6, **options | ({"intervals": 5} if "table" in name else {}))  # type: ignore[arg-type]
    for name, options in FUNCTIONS
]
kinds = pytest.mark.parametrize("case", USUAL, ids=str)


@pytest.mark.parametrize(
    ("case", "dtype", "at_once"),
    [  # alternating; the slow tests of every instruction set run all combinations
        (case, dtype, (i + i // len(SHAPES) + j) % 2 == 0)
        for i, case in enumerate(MONOTONE_CASES)
        for j, dtype in enumerate((torch.float32, torch.float64))
    ],
    ids=name_of,
)
def test_equals_reference(
    case: MonotoneCase, dtype: torch.dtype, at_once: bool, device: torch.device
) -> None:
    check_monotone(case, dtype, device, at_once)


@kinds
def test_without_the_gradient_of_the_table(case: MonotoneCase, device: torch.device) -> None:
    """The other results are the same bits."""
    batch = monotone_batch(case, torch.float32).to(device)
    log_normalizer = forward(*batch.arguments())[1]
    for op, given in (
        (backward_, (batch.grad, batch.target, log_normalizer)),
        (torch.ops.hstree.target_log_softmax_gradient_, (batch.grad, batch.target)),
    ):
        with_table, without = batch.logits.clone(), batch.logits.clone()
        op(with_table, *given, *batch.arguments()[2:])
        result = op(without, *given, *batch.arguments()[2:], table_gradient=False)
        assert torch.equal(with_table, without)
        assert (result if op is backward_ else result[1]).shape == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", USUAL, ids=str)
def test_at_once_equals_two_steps_at_the_edges(
    case: MonotoneCase, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows with infinities, NaN, logits beyond any radius and at it, of whole vectors and not."""
    batch = monotone_batch(case, dtype)
    x = batch.logits.clone()
    x[0, 3], x[1, 4], x[2, 5] = -math.inf, math.inf, math.nan
    x[3], x[4], x[5, 0], x[6, -1] = -math.inf, batch.radius, -batch.radius, -math.inf
    x[7, -1], x[8], x[9, 0] = math.nan, 1e4 * x[8], -math.inf
    target = batch.target.clone()
    target[0], target[9], target[10] = 3, 0, -1
    for row in range(12):  # one by one, as a NaN spoils the table's gradient
        some = slice(row, row + 1)
        one = replace(batch, logits=x[some], target=target[some], grad=batch.grad[some]).to(device)
        got, expected = monotone_gradients(one, at_once=True), monotone_gradients(one)
        rtol = 1e-4 if dtype == torch.float32 else 1e-10
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, equal_nan=True)


@kinds
def test_distribution(case: MonotoneCase, device: torch.device) -> None:
    """The probabilities of all classes sum to 1."""
    row = monotone_batch(replace(case, rows=1), torch.float64).to(device)
    every = replace(row, logits=row.logits.expand(83, 83), target=torch.arange(83, device=device))
    log_prob = target_log_softmax(*every.arguments())
    torch.testing.assert_close(log_prob.exp().sum().item(), 1.0, rtol=1e-12, atol=0.0)


def test_gss_of_k_1_is_the_softmax(device: torch.device) -> None:
    """Whatever c; the same bits."""
    batch = monotone_batch(USUAL[0], torch.float32).to(device)
    same_bits(monotone_gradients(replace(batch, c=3.0)), monotone_gradients(batch))
    with_table = monotone_batch(USUAL[4], torch.float32).to(device)
    other = replace(with_table, c=3.0, k=math.nan)  # not looked at
    same_bits(monotone_gradients(other), monotone_gradients(with_table))


# Large logits, infinities, NaN


@kinds
def test_logits_of_ten_thousand(case: MonotoneCase, device: torch.device) -> None:
    """Near 10,000, near -10,000 and both: as exact as float32 logits of that size allow."""
    batch = monotone_batch(replace(case, rows=12, ignored=0.0), torch.float32)
    offset = torch.tensor([1e4, -1e4, 0.0] * 4)[:, None]
    batch.logits += offset
    batch.logits[2::3, ::2] += 1e4
    batch.logits[2::3, 1::2] -= 1e4
    true = monotone_reference(batch.map(Tensor.double))
    got = [x.cpu().double() for x in monotone_gradients(batch.to(device))]
    eps = torch.finfo(torch.float32).eps
    largest = monotone_value(batch, batch.logits).abs().max().item()
    assert largest > 5000
    assert all(x.isfinite().all() for x in got)
    torch.testing.assert_close(got[0], true[0], rtol=2 * eps, atol=4 * eps * largest)
    torch.testing.assert_close(got[1], true[1], rtol=2 * eps, atol=0.0)
    steepest = 3.0 * batch.grad.abs().max().item()
    torch.testing.assert_close(got[2], true[2], rtol=0.0, atol=8 * eps * largest * steepest)


@pytest.mark.parametrize(("k", "shift"), [(1.0, -12288.0), (1.0, 12288.0), (2.5, 12288.0)], ids=str)
def test_large_logits_are_as_exact_as_small_ones(
    k: float, shift: float, device: torch.device
) -> None:
    """Moved by what float32 holds exactly, to where f has slope 1: the same gradient."""
    batch = monotone_batch(USUAL[0], torch.float32)
    batch = replace(batch, logits=(batch.logits * 64).round() / 64).to(device)
    small = monotone_gradients(batch)
    large = monotone_gradients(replace(batch, k=k, c=-1.5, logits=batch.logits + shift))
    torch.testing.assert_close(large[0], small[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(large[2], small[2], rtol=1e-5, atol=1e-6)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_classes_at_minus_infinity(
    case: MonotoneCase, dtype: torch.dtype, device: torch.device
) -> None:
    """As if they were not there: the sums of the other classes, gradient exactly 0."""
    case = replace(case, classes=40, rows=9, ignored=0.0)
    batch = monotone_batch(case, dtype).to(device)
    batch.target %= 20
    gone = torch.arange(40, device=device) >= 20
    batch.logits[:, gone] = -math.inf
    got = monotone_gradients(batch)
    expected = monotone_gradients(replace(batch, logits=batch.logits[:, :20].contiguous()))
    for a, b in zip(got[:2], expected, strict=False):
        torch.testing.assert_close(a, b)
    assert (got[2][:, gone] == 0).all()
    torch.testing.assert_close(got[2][:, :20], expected[2])
    if batch.table is not None:
        tolerance = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(got[3], expected[3], rtol=tolerance, atol=tolerance)


@kinds
def test_target_at_minus_infinity(case: MonotoneCase, device: torch.device) -> None:
    batch = monotone_batch(replace(case, rows=3, classes=5, ignored=0.0), torch.float64).to(device)
    batch.target[:] = 2
    batch.logits[1, 2] = -math.inf
    got, true = monotone_gradients(batch), monotone_reference(batch)
    assert got[0][1] == -math.inf
    assert got[2][1, 2] == 0
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a.cpu(), b)


@kinds
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 40, 82])
def test_nan_or_infinity_makes_its_row_nan(
    case: MonotoneCase, bad: float, place: int, device: torch.device
) -> None:
    batch = monotone_batch(replace(case, ignored=0.0), torch.float32).to(device)
    expected = monotone_gradients(batch)
    batch.logits[4, place] = bad
    got = monotone_gradients(batch)
    assert got[0][4].isnan()
    assert not got[1][4].isfinite()
    assert got[2][4].isnan().any()
    others = torch.arange(29, device=device) != 4
    same_bits([x[others] for x in got[:3]], [x[others] for x in expected[:3]])
    if batch.table is not None:
        assert got[3].isnan().any()


@kinds
def test_all_classes_at_minus_infinity(case: MonotoneCase, device: torch.device) -> None:
    batch = monotone_batch(replace(case, ignored=0.0), torch.float32).to(device)
    batch.logits[4] = -math.inf
    got = monotone_gradients(batch)
    assert got[0][4].isnan()
    assert got[0].isnan().sum() == 1


@kinds
def test_ignored_rows_are_not_looked_at(case: MonotoneCase, device: torch.device) -> None:
    batch = monotone_batch(replace(case, ignored=0.0), torch.float32).to(device)
    expected = monotone_gradients(
        replace(batch, grad=batch.grad.index_fill(0, torch.tensor([4], device=device), 0.0))
    )
    batch.target[4] = -1
    batch.logits[4] = torch.tensor([math.nan, math.inf, -math.inf], device=device).repeat(28)[:83]
    batch.grad[4] = math.inf
    got = monotone_gradients(batch)
    assert got[0][4] == 0
    assert (got[2][4] == 0).all()
    others = torch.arange(29, device=device) != 4
    same_bits([x[others] for x in got[:3]], [x[others] for x in expected[:3]])
    if batch.table is not None:
        assert torch.equal(got[3], expected[3])


def test_non_finite_gradient_is_not_lost(device: torch.device) -> None:
    for case in USUAL:
        for bad in (math.nan, math.inf):
            batch = monotone_batch(replace(case, ignored=0.0), torch.float32).to(device)
            batch.grad[4] = bad
            got = monotone_gradients(batch)
            assert not got[2][4].isfinite().any()
            assert got[2].isfinite().sum() == got[2].numel() - 83
            if batch.table is not None:
                assert got[3].isnan().any()


# Determinism


DETERMINISTIC = [
    *(replace(MANY_LOGITS, why=name, **options) for name, options in FUNCTIONS),  # type: ignore[arg-type]
    replace(MANY_LOGITS, why="intervals as published", intervals=100_000, radius=20.0),
    replace(MANY_LOGITS, why="most logits outside", intervals=10, radius=0.5, width=4),
]


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_same_bits_for_every_run_and_number_of_threads(case: MonotoneCase) -> None:
    for dtype in (torch.float32, torch.float64):
        batch = monotone_batch(case, dtype)
        for at_once in (False, True):
            with threads(1):
                first = monotone_gradients(batch, at_once)
                same_bits(monotone_gradients(batch, at_once), first)
            for count in (2, 5):
                with threads(count):
                    same_bits(monotone_gradients(batch, at_once), first)


@pytest.mark.cuda
@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_same_bits_for_every_run_on_cuda(case: MonotoneCase) -> None:
    batch = monotone_batch(case, torch.float32).to(torch.device("cuda"))
    first = monotone_gradients(batch)
    for _ in range(5):
        same_bits(monotone_gradients(batch), first)


@kinds
def test_rows_do_not_depend_on_each_other(case: MonotoneCase, device: torch.device) -> None:
    batch = monotone_batch(case, torch.float32).to(device)
    got = monotone_gradients(batch)
    for i in range(0, 29, 7):
        row = slice(i, i + 1)
        one = replace(batch, logits=batch.logits[row], target=batch.target[row],
                      grad=batch.grad[row])  # fmt: skip
        same_bits(monotone_gradients(one)[:3], [x[row] for x in got[:3]])


@pytest.mark.parametrize("case", USUAL[4:], ids=str)
def test_sums_of_the_table_do_not_depend_on_the_order_of_rows(
    case: MonotoneCase, device: torch.device
) -> None:
    """They are sums of integers, for logits within the radius."""
    batch = monotone_batch(replace(case, rows=300, spread=1.0, radius=8.0)).to(device)
    assert batch.logits.abs().max() < 8
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(device)
    other = replace(batch, logits=batch.logits[order], target=batch.target[order],
                    grad=batch.grad[order])  # fmt: skip
    assert torch.equal(monotone_gradients(other)[3], monotone_gradients(batch)[3])


@pytest.mark.parametrize("intervals", [1, 1000])
def test_sums_of_the_table_add_up(intervals: int, device: torch.device) -> None:
    """The constants of all intervals together move every f alike, which changes nothing: the sum of
    their gradients is 0, but for the quantum and the rounding of p."""
    batch = monotone_batch(MonotoneCase("", rows=200, classes=500), torch.float32).to(device)
    table = increasing_table(intervals, 2, 20.0).float().to(device)
    got = monotone_gradients(replace(batch, table=table, radius=20.0))
    rows = batch.grad[batch.target >= 0].abs().double()
    assert abs(got[3][:, 0].sum().item()) <= 1e-6 * rows.sum().item()


# Tensors of other layouts, torch's machinery


@kinds
@pytest.mark.parametrize("how", ["sliced", "transposed"])
def test_noncontiguous(case: MonotoneCase, how: str, device: torch.device) -> None:
    batch = monotone_batch(case, torch.float32).to(device)
    expected = monotone_gradients(batch)
    other = batch.map(lambda x: strided(x, how))
    other = replace(other, target=strided(batch.target, how))
    assert not other.logits.is_contiguous()
    assert not other.target.is_contiguous()
    same_bits(monotone_gradients(other), expected)
    leaf = other.logits.detach().requires_grad_()
    target_log_softmax(*replace(other, logits=leaf).arguments()).backward(other.grad)
    assert torch.equal(leaf.grad, expected[2])


@kinds
def test_rows_with_gaps(case: MonotoneCase) -> None:
    """Forward, and both gradients in place, on the CPU; what is between the rows stays."""
    batch = monotone_batch(case, torch.float32)
    rows, classes = batch.logits.shape
    expected = monotone_gradients(batch)
    for function in (False, True):
        memory = torch.full((rows, classes + 3), 7.0)
        wide = memory[:, :classes].copy_(batch.logits)
        _, *rest = batch.arguments()
        log_prob, normalizer = torch.ops.hstree.target_log_softmax(wide, *rest)
        if function:
            found = torch.ops.hstree.target_log_softmax_gradient_(wide, batch.grad, *rest)
            torch.testing.assert_close(found[0], log_prob, equal_nan=True)
        else:
            target, *of_function = rest
            torch.ops.hstree.target_log_softmax_backward_(
                wide, batch.grad, target, normalizer, *of_function
            )
            assert torch.equal(wide.nan_to_num(), expected[2].nan_to_num())
        torch.testing.assert_close(wide, expected[2], equal_nan=True)
        assert bool((memory[:, classes:] == 7).all())


@pytest.mark.parametrize("case", [*USUAL, MonotoneCase("many", rows=3, classes=1500)], ids=str)
def test_rounded_to_16_bits(case: MonotoneCase, device: torch.device) -> None:
    check_low_rows(case, device)


@pytest.mark.cuda
@kinds
def test_bias_on_cuda(case: MonotoneCase) -> None:
    for dtype in (torch.float32, torch.float64):
        check_bias(case, dtype, torch.device("cuda"))


@pytest.mark.parametrize(
    ("low", "match"),
    [
        (lambda x: x.bfloat16()[0], r"low: expected shape \[R, V\], got \[6\]"),
        (lambda x: x.bfloat16()[1:], r"low: expected size 5 \(rows of logits\)"),
        (lambda x: x.bfloat16()[:, 1:], r"low: expected size 6 \(classes of logits\)"),
        (lambda x: x.clone(), "low: expected dtype bfloat16 or float16, got Float"),
        (lambda x: x.t().contiguous().t().half(), "low: expected contiguous rows, got strides 1 "),
    ],
)
def test_bad_rows_of_16_bits(low: Callable[[Tensor], Tensor], match: str) -> None:
    batch = monotone_batch(SMALL[0], torch.float32)
    values = batch.logits, batch.grad, batch.target, batch.grad, *batch.arguments()[2:], True
    with pytest.raises(RuntimeError, match=match):
        backward_(*values, low(batch.logits))
    batch = monotone_batch(SMALL[0], torch.float64)
    values = batch.logits, batch.grad, batch.target, batch.grad, *batch.arguments()[2:], True
    with pytest.raises(RuntimeError, match="low: expected None for logits that are not float32"):
        backward_(*values, batch.logits.half())


def test_log_normalizer_is_not_differentiable(device: torch.device) -> None:
    batch = monotone_batch(SMALL[0], torch.float32).to(device)
    batch.logits.requires_grad_()
    log_prob, log_normalizer = forward(*batch.arguments())
    assert log_prob.requires_grad
    assert not log_normalizer.requires_grad


@pytest.mark.parametrize("case", [SMALL[2], SMALL[4]], ids=str)
def test_opcheck(case: MonotoneCase, device: torch.device) -> None:
    batch = monotone_batch(case, torch.float32).to(device)
    log_normalizer = forward(*batch.arguments())[1]
    arguments = (batch.logits.clone(), batch.grad, batch.target, log_normalizer,
                 *batch.arguments()[2:])  # fmt: skip
    torch.library.opcheck(backward_, arguments)
    torch.library.opcheck(
        torch.ops.hstree.target_log_softmax_gradient_,
        (batch.logits.clone(), batch.grad, batch.target, *batch.arguments()[2:]),
    )
    batch.logits.requires_grad_()
    if batch.table is not None:
        batch.table.requires_grad_()
    torch.library.opcheck(forward, batch.arguments())


# Bad input


def raises(batch: MonotoneBatch, match: str) -> None:
    """Forward and backward."""
    with pytest.raises(RuntimeError, match=f"^hstree::target_log_softmax: {match}"):
        forward(*batch.arguments())
    with pytest.raises(RuntimeError, match=f"^hstree::target_log_softmax_backward_: {match}"):
        backward_(batch.logits, batch.grad, batch.target, batch.grad, *batch.arguments()[2:])


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("logits", lambda x: x[0], r"logits: expected shape \[R, V\], got \[6\]"),
        ("logits", lambda x: x[:, :0].clone(), r"logits: expected at least 1 class, got shape \["),
        ("logits", Tensor.bfloat16, "logits: expected dtype float32 or float64, got BFloat16"),
        ("logits", Tensor.half, "logits: expected dtype float32 or float64, got Half"),
        ("logits", Tensor.int, "logits: expected dtype float32 or float64, got Int"),
        ("target", lambda y: y[1:], r"target: expected size 5 \(rows of logits\) .*\[4\]"),
        ("target", lambda y: y[:, None], r"target: expected shape \[R\], got \[5, 1\]"),
        ("target", Tensor.int, "target: expected dtype Long, got Int"),
        ("table", lambda t: t[:, 0], r"table: expected shape \[K, 2\] or \[K, 4\], got \[5\]"),
        ("table", lambda t: t[:, :1], r"table: expected shape .* got \[5, 1\]"),
        ("table", lambda t: t[:0], r"table: expected 1 to 8388608 intervals, got shape \[0, 2\]"),
        ("table", Tensor.double, "table: expected dtype Float for logits of dtype Float, got Doub"),
        ("radius", 0.0, "radius: expected a finite number above 0, got 0"),
        ("radius", math.nan, "radius: expected a finite number above 0, got nan"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_argument(name: str, value: Any, match: str, device: torch.device) -> None:
    batch = monotone_batch(SMALL[4], torch.float32).to(device)
    change = value(getattr(batch, name)) if callable(value) else value
    raises(replace(batch, **{name: change}), match)


@pytest.mark.parametrize("name", ["c", "k"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_bad_c_or_k(name: str, value: float, device: torch.device) -> None:
    batch = replace(monotone_batch(SMALL[1], torch.float32).to(device), **{name: value})
    if name == "c" and math.isfinite(value):
        assert forward(*batch.arguments())[0].isfinite().all()
        return
    what = "a finite number above 0" if name == "k" else "a finite number"
    raises(batch, f"{name}: expected {what}, got {value:g}")


@pytest.mark.parametrize("value", [6, -2, 2**31, 2**62, -(2**62)])
@pytest.mark.parametrize("case", [SMALL[0], SMALL[4]], ids=str)
def test_target_out_of_range(case: MonotoneCase, value: int) -> None:
    batch = monotone_batch(case, torch.float32)
    batch.target[3] = value
    raises(batch, rf"target\[3\]: expected .*\b6\b.*got {value}")


@pytest.mark.cuda
@pytest.mark.parametrize("value", [6, -2, 2**62])
def test_cuda_gives_nan_where_the_cpu_raises(value: int) -> None:
    batch = monotone_batch(SMALL[4], torch.float32).to(torch.device("cuda"))
    expected = monotone_gradients(batch)
    batch.target[3] = value
    got = monotone_gradients(batch)
    assert got[0][3].isnan()
    others = torch.arange(5, device="cuda") != 3
    same_bits([x[others] for x in got[:3]], [x[others] for x in expected[:3]])


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("grad_log_prob", lambda x: x[1:], r"grad_log_prob: expected size 5 \(rows of logits\)"),
        ("grad_log_prob", lambda x: x[:, None], r"grad_log_prob: expected shape \[R\], got \[5, "),
        ("grad_log_prob", Tensor.double, "grad_log_prob: expected dtype Float for logits of dtyp"),
        ("log_normalizer", lambda x: x[1:], r"log_normalizer: expected size 5 \(rows of logits\)"),
        ("log_normalizer", lambda x: x[:, None], r"log_normalizer: expected shape \[R\], got \[5"),
        ("log_normalizer", Tensor.double, "log_normalizer: expected dtype Float for logits of dt"),
        ("logits", lambda x: x.t().contiguous().t(), "logits: expected contiguous rows, got s"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_gradient(name: str, value: Any, match: str, device: torch.device) -> None:
    batch = monotone_batch(SMALL[1], torch.float32).to(device)
    arguments = {"logits": batch.logits, "grad_log_prob": batch.grad,
                 "target": batch.target, "log_normalizer": batch.grad}  # fmt: skip
    arguments[name] = value(arguments[name])
    with pytest.raises(RuntimeError, match=f"^hstree::target_log_softmax_backward_: {match}"):
        backward_(*arguments.values(), *batch.arguments()[2:])


@pytest.mark.cuda
def test_devices_must_agree() -> None:
    batch = monotone_batch(SMALL[4], torch.float32)
    cuda = batch.to(torch.device("cuda"))
    for name in ("target", "table"):
        bad = replace(cuda, **{name: getattr(batch, name)})
        raises(bad, f"{name}: expected the device of logits, cuda")


@pytest.mark.parametrize("shape", [(3, 7), (1, 1), (0, 5), (2, 3, 40), (9,)], ids=str)
def test_log_softmax_is_that_of_torch(shape: tuple[int, ...], device: torch.device) -> None:
    """In float64, with gradients of the first and second order."""
    scores = 5 * torch.randn(shape, dtype=torch.float64, device=device)
    scores = scores.requires_grad_()
    weight = torch.linspace(-1, 2, scores.numel(), dtype=torch.float64, device=device).view(shape)
    found = []
    for function in (log_softmax, lambda x: x.log_softmax(-1)):
        value = function(scores)
        (first,) = torch.autograd.grad((weight * value).sum(), scores, create_graph=True)
        second = torch.autograd.grad((first * weight).sum(), scores)[0]
        found.append([value, first, second])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_log_softmax_of_strided_and_impossible_scores(device: torch.device) -> None:
    scores = torch.randn(6, 5, 4, device=device).transpose(0, 2)
    torch.testing.assert_close(log_softmax(scores), scores.log_softmax(-1))
    scores = torch.randn(4, 6, device=device)
    scores[0, 0] = scores[1, 3] = scores[2] = -math.inf
    scores[3, 2] = math.nan
    scores.requires_grad_()
    log_prob = log_softmax(scores)
    torch.testing.assert_close(log_prob, scores.log_softmax(-1), equal_nan=True)
    (grad,) = torch.autograd.grad(log_prob[:2, 1].sum(), scores)
    assert grad[:2].isfinite().all()
    assert grad[0, 0] == grad[1, 3] == 0


def test_log_softmax_of_many_classes(device: torch.device) -> None:
    """A class of 3/4, and large scores that all share a term."""
    scores = torch.zeros(2, 3_000_001, device=device)
    scores[:, 77] = math.log(9e6)
    scores[1] += 500
    expected = scores.double().log_softmax(1)
    compiled = torch.compile(log_softmax, fullgraph=True, backend=BACKEND)
    for function in (log_softmax, compiled):
        torch.testing.assert_close(function(scores).double(), expected, rtol=0, atol=1e-6)


def test_log_softmax_transforms_and_compiles() -> None:
    scores, along = torch.randn(2, 3, 4, 9, dtype=torch.float64)
    expected = scores.log_softmax(-1)
    got = torch.func.jacrev(lambda x: log_softmax(x)[:, 2])(scores[0])
    wanted = torch.func.jacrev(lambda x: x.log_softmax(1)[:, 2])(scores[0])
    torch.testing.assert_close(got, wanted)
    program = torch.export.export(Exported(), (scores,))
    torch.testing.assert_close(program.module()(scores), expected)
    compiled = torch.compile(log_softmax, fullgraph=True, backend="aot_eager")
    scores.requires_grad_()
    torch.testing.assert_close(compiled(scores), expected)
    (got,) = torch.autograd.grad((compiled(scores) * along).sum(), scores)
    (wanted,) = torch.autograd.grad((scores.log_softmax(-1) * along).sum(), scores)
    torch.testing.assert_close(got, wanted)


class Exported(torch.nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return log_softmax(scores)
