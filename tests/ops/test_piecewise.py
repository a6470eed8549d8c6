"""torch.ops.hstree.piecewise and its gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference.piecewise import piecewise_reference
from torch import Tensor

from hstree.ops import piecewise
from ops.cases import name_of, same_bits, strided, threads, with_dtypes
from ops.logit_function_cases import (
    DTYPES,
    MANY_ELEMENTS,
    PIECEWISE_CASES,
    PiecewiseBatch,
    PiecewiseCase,
    accumulate,
    by_interval,
    check_piecewise,
    in_float64,
    increasing_table,
    piecewise_batch,
    piecewise_gradients,
    place,
    within,
)

USUAL = PiecewiseCase("matrix")
SMALL = PiecewiseCase("small", shape=(5, 4), intervals=6)
backward = torch.ops.hstree.piecewise_backward

widths = pytest.mark.parametrize("width", [2, 4], ids=["linear", "cubic"])


@widths
@pytest.mark.parametrize(("case", "dtype"), with_dtypes(PIECEWISE_CASES), ids=name_of)
def test_equals_reference(
    case: PiecewiseCase, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_piecewise(case, width, dtype, device)


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


@every_dtype
def test_literal_values(dtype: torch.dtype, device: torch.device) -> None:
    """Slope 3 below 0 and 1 above, f(-1) = 0; a knot belongs to the interval on its right."""
    batch = PiecewiseBatch(
        torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0], dtype=dtype),
        torch.tensor([[0.0, 3.0], [3.0, 1.0]], dtype=accumulate(dtype)),
        1.0,
        torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0], dtype=dtype),
    ).to(device)
    output, grad_input, grad_table = piecewise_gradients(batch)
    assert output.tolist() == [-3.0, 0.0, 1.5, 3.0, 3.5, 4.0, 6.0]
    assert grad_input.tolist() == [3.0, 6.0, 12.0, 8.0, 16.0, 32.0, 64.0]
    # u is -1, 0, 0.5 in the first interval, 0, 0.5, 1, 3 in the second.
    assert grad_table.tolist() == [[7.0, -1 + 2.0], [120.0, 8.0 + 32.0 + 192.0]]


@pytest.mark.parametrize("intervals", [1, 2, 7, 64, 1024])
@widths
def test_every_knot_belongs_to_the_right(intervals: int, width: int, device: torch.device) -> None:
    """Knots, and in float64 values a millionth off them: derivatives as they are there."""
    radius = intervals / 2  # rate 1: x + K / 2 is t, exactly
    knots = torch.arange(intervals + 1, dtype=torch.float64) - radius
    x = torch.cat([knots - 1e-6, knots, knots + 1e-6])
    j = (x + radius).floor().clamp(0, intervals - 1).long()
    slopes = 1.0 + torch.arange(intervals, dtype=torch.float64) % 5
    table = torch.zeros(intervals, width, dtype=torch.float64)
    table[:, 1] = slopes
    near = PiecewiseBatch(x, table, radius, torch.ones_like(x)).to(device)
    assert torch.equal(piecewise_gradients(near)[1].cpu(), slopes[j])
    exact = slice(len(knots), 2 * len(knots))
    low = replace(near, input=x[exact].to(device).float(), table=near.table.float(),
                  grad=torch.ones(len(knots), device=device))  # fmt: skip
    assert torch.equal(low.input.cpu().double(), knots)
    assert torch.equal(piecewise_gradients(low)[1].cpu().double(), slopes[j[exact]])


@pytest.mark.parametrize("intervals", [2**23, 2**23 - 1])
def test_most_intervals(intervals: int, device: torch.device) -> None:
    """The middle of each is a float32, and its number too."""
    table = torch.zeros(intervals, 2, device=device)
    table[:, 0] = torch.arange(intervals, device=device) % 1021
    table[:, 1] = 1.0
    j = torch.cat([torch.arange(k, k + 20) for k in (0, intervals // 2 - 10, intervals - 20)])
    x = (j - intervals / 2 + 0.5).float()
    got = piecewise(x.to(device), table, intervals / 2)
    assert got.tolist() == (j % 1021 + 0.5).tolist()
    with pytest.raises(RuntimeError, match="table: expected 1 to 8388608 intervals"):
        piecewise(x.to(device), table[:1].expand(2**23 + 1, 2), 1.0)


def test_a_continuous_function_is_accurate_at_its_knots(device: torch.device) -> None:
    """Where float32 may take the interval beside: no error to speak of in f."""
    table = increasing_table(100_000, 2, 20.0).float()
    x = (torch.arange(100_001) / 2500 - 20).float()
    x = torch.cat([x.nextafter(x - 1), x, x.nextafter(x + 1)])
    true = piecewise_reference(x.double(), table.double(), 20.0)
    got = piecewise(x.to(device), table.to(device), 20.0).cpu().double()
    # Three roundings of f, and two of x by the largest slope.
    eps = torch.finfo(torch.float32).eps
    assert (got - true).abs().max() <= 20 * eps * (1.5 + 2500 * table[:, 1].max())


# Non-finite and extreme values


def test_nan_and_infinities(device: torch.device) -> None:
    table = torch.tensor([[0.0, 3.0], [3.0, -1.0]], device=device)
    x = torch.tensor([math.nan, -math.inf, math.inf, 0.5], device=device)
    expected = torch.tensor([math.nan, -math.inf, -math.inf, 2.5])
    for dtype in DTYPES:
        typed = table.to(torch.float64 if dtype == torch.float64 else torch.float32)
        output = piecewise(x.to(dtype), typed, 1.0)
        assert torch.equal(output.isnan().cpu(), expected.isnan())
        assert torch.equal(output[1:].cpu().float(), expected[1:])
    flat = piecewise(x[1:], torch.tensor([[1.0, 0.0]], device=device), 1.0)
    assert flat[:2].isnan().all()
    assert flat[2] == 1


@every_dtype
@widths
def test_largest_values(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """No interval out of range, no NaN on the way."""
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x = torch.tensor([-largest, -largest / 2**10, -tiny, tiny, largest / 2**10, largest],
                     dtype=dtype)  # fmt: skip
    table = torch.zeros(64, width, dtype=torch.float64)
    table[:, 0] = torch.arange(64) / 4 - 8
    table[:, 1] = 0.25  # x / 4
    batch = PiecewiseBatch(x, table.to(accumulate(dtype)), 32.0, torch.ones_like(x)).to(device)
    output, grad_input, grad_table = piecewise_gradients(batch)
    torch.testing.assert_close(output[[0, 1, 4, 5]], 0.25 * batch.input[[0, 1, 4, 5]])
    assert (grad_input == 0.25).all()
    assert grad_table[1:-1, 0].sum() == 2
    assert not grad_table[1:31].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@widths
def test_non_finite_input_shows_in_the_gradient(
    bad: float, width: int, device: torch.device
) -> None:
    batch = piecewise_batch(USUAL, width, torch.float32).to(device)
    expected = piecewise_gradients(batch)
    batch.input[3, 5] = bad
    _, grad_input, grad_table = piecewise_gradients(batch)
    end = -1 if bad > 0 else 0  # of a NaN the first, too
    assert not grad_table[end].isfinite().all()
    assert grad_table[end].isnan().all() == math.isnan(bad)
    others = torch.ones_like(batch.input, dtype=torch.bool)
    others[3, 5] = False
    assert torch.equal(grad_input[others], expected[1][others])
    assert grad_table.isfinite().all(1).sum() == len(grad_table) - 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@widths
def test_non_finite_gradient_shows_in_every_sum(
    bad: float, width: int, device: torch.device
) -> None:
    for dtype in DTYPES:
        batch = piecewise_batch(USUAL, width, dtype).to(device)
        batch.grad[3, 5] = bad
        _, grad_input, grad_table = piecewise_gradients(batch)
        assert grad_table.isnan().all()
        assert not grad_input[3, 5].isfinite()
        assert grad_input.isfinite().sum() == grad_input.numel() - 1


@widths
def test_infinite_input_without_gradient(width: int, device: torch.device) -> None:
    """Infinity in the sums of that end but for those of the constants; nothing where grad is 0, but
    for a NaN."""
    table = torch.ones(3, width, device=device)
    x = torch.tensor([-math.inf, 0.0, math.inf], device=device)
    grad_table = backward(torch.ones_like(x), x, table, 1.0)[1].cpu()
    assert grad_table[0].tolist() == [1.0, -math.inf, 0.0, 0.0][:width]
    assert grad_table[2].tolist() == [1.0, math.inf, math.inf, math.inf][:width]
    assert grad_table[1].isfinite().all()
    grad = torch.tensor([0.0, 1.0, 0.0], device=device)
    assert not backward(grad, x, table, 1.0)[1][[0, 2]].any()
    x[0] = math.nan
    assert torch.equal(
        backward(grad, x, table, 1.0)[1].isnan().all(1).cpu(), torch.tensor([True, False, False])
    )


@widths
def test_zero_gradient(width: int, device: torch.device) -> None:
    batch = piecewise_batch(USUAL, width, torch.float32).to(device)
    _, grad_input, grad_table = piecewise_gradients(
        replace(batch, grad=torch.zeros_like(batch.grad))
    )
    assert not grad_input.any()
    assert not grad_table.any()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 2.0**-149),
        (torch.float32, 2.0**-126),
        (torch.float32, 2.0**124),
        (torch.float64, 2.0**-1022),
        (torch.float64, 2.0**1020),
    ],
    ids=name_of,
)
def test_gradients_at_the_ends_of_the_range(
    dtype: torch.dtype, size: float, device: torch.device
) -> None:
    """Sums of eight equal numbers, exact."""
    table = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=dtype, device=device)
    x = torch.full((8,), -0.5, dtype=dtype, device=device)
    grad_table = backward(torch.full_like(x, size), x, table, 1.0)[1]
    assert grad_table.tolist() == [[8 * size, 4 * size], [0.0, 0.0]]


def test_sums_cancel_exactly(device: torch.device) -> None:
    """They are integers: what cancels leaves nothing, and a small rest stays."""
    grad = torch.randn(500, generator=torch.Generator().manual_seed(0))
    grad = torch.cat([grad, -grad, torch.tensor([1e-9])]).to(device)
    x = torch.full_like(grad, -0.5)
    got = backward(grad, x, torch.ones(1, 2, device=device), 1.0)[1][0, 0].item()
    assert got == pytest.approx(1e-9, rel=1e-6)


# Determinism


@pytest.mark.parametrize("intervals", [3, 1000, 100_000])
@widths
def test_same_bits_for_every_run_and_number_of_threads(width: int, intervals: int) -> None:
    """Elements outside are summed in floating point: nearly all of them are, with 3 intervals."""
    radius = 0.5 if intervals == 3 else 5.0
    case = replace(MANY_ELEMENTS, intervals=intervals, radius=radius)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        batch = piecewise_batch(case, width, dtype)
        with threads(1):
            first = piecewise_gradients(batch)
            same_bits(piecewise_gradients(batch), first)
        for count in (2, 5):
            with threads(count):
                same_bits(piecewise_gradients(batch), first)


@pytest.mark.cuda
@widths
def test_same_bits_for_every_run_on_cuda(width: int) -> None:
    for case in (MANY_ELEMENTS, replace(MANY_ELEMENTS, intervals=100_000)):
        batch = piecewise_batch(case, width, torch.float32).to(torch.device("cuda"))
        first = piecewise_gradients(batch)
        for _ in range(5):
            same_bits(piecewise_gradients(batch), first)


@pytest.mark.parametrize("intervals", [3, 1000, 100_000])
@widths
def test_sums_do_not_depend_on_the_order(intervals: int, width: int, device: torch.device) -> None:
    """Within the radius they are sums of integers: elements in any order give the same bits."""
    case = PiecewiseCase("", shape=(70_001,), intervals=intervals, spread=1.0, radius=8.0)
    batch = piecewise_batch(case, width, torch.float32).to(device)
    assert batch.input.abs().max() < 8
    order = torch.randperm(70_001, generator=torch.Generator().manual_seed(0)).to(device)
    other = replace(batch, input=batch.input[order], grad=batch.grad[order])
    assert torch.equal(piecewise_gradients(other)[2], piecewise_gradients(batch)[2])


@every_dtype
def test_elements_do_not_depend_on_their_place(dtype: torch.dtype, device: torch.device) -> None:
    """Vector code and the rest at the end give the same bits, and so do tensors at any address."""
    batch = piecewise_batch(PiecewiseCase("", shape=(67,)), 4, dtype).to(device)
    output, grad_input, grad_table = piecewise_gradients(batch)
    for begin in (0, 1, 5, 50):
        part = replace(batch, input=batch.input[begin:], grad=batch.grad[begin:])
        same_bits(piecewise_gradients(part)[:2], [output[begin:], grad_input[begin:]])
    for shift in (1, 2):
        input, grad = (torch.cat([x[:shift], x])[shift:] for x in (batch.input, batch.grad))
        moved = replace(batch, input=input, grad=grad)
        same_bits(piecewise_gradients(moved), [output, grad_input, grad_table])


@widths
def test_sums_of_many_equal_terms(width: int, device: torch.device) -> None:
    """A million terms in one interval: float32 sums would be off by many times their rounding."""
    grad = torch.full((1_000_000,), 0.1, device=device)
    x = torch.full((1_000_000,), 0.3, device=device)
    table = torch.ones(1, width, device=device)
    grad_table = backward(grad, x, table, 1.0)[1].cpu()[0]
    u = float(x[0]) / 2 + 0.5
    true = torch.tensor([1e6 * float(grad[0]) * u**m for m in range(width)], dtype=torch.float64)
    torch.testing.assert_close(grad_table.double(), true, rtol=3e-7, atol=0.0)


def test_wide_range_of_gradients_loses_nothing_that_counts(device: torch.device) -> None:
    """Against exact sums: half a quantum of 2**-61 of the sum of the largest for each term."""
    batch = piecewise_batch(
        PiecewiseCase("", shape=(50_000,), intervals=20, decades=30.0), 2, torch.float64
    )
    batch.input.clamp_(-4.999, 4.999)
    exact = in_float64(batch)
    where = place(*exact.arguments(), torch.finfo(torch.float64).eps)
    terms = (exact.grad[:, None] * where.weight).numpy().astype(np.longdouble)
    true = np.zeros((20, 2), np.longdouble)
    np.add.at(true, where.interval.numpy(), terms)
    count = by_interval(where, torch.ones(50_000, 1, dtype=torch.float64), 20)
    rounding = by_interval(where, exact.grad.abs()[:, None] * where.weight, 20) * 1e-15
    bound = count * 50_000 * exact.grad.abs().max() * 2.0**-62 + rounding
    got = backward(*(x.to(device) for x in (batch.grad, batch.input, batch.table)), 5.0)[1]
    within("grad_table", got, torch.from_numpy(true.astype(np.float64)), bound)


# Tensors of other layouts, torch's machinery


@pytest.mark.parametrize("how", ["sliced", "transposed"])
@widths
def test_noncontiguous(how: str, width: int, device: torch.device) -> None:
    batch = piecewise_batch(USUAL, width, torch.float32).to(device)
    input, table, grad = (strided(x, how) for x in (batch.input, batch.table, batch.grad))
    assert not any(x.is_contiguous() for x in (input, table, grad))
    same_bits(
        piecewise_gradients(PiecewiseBatch(input, table, 5.0, grad)), piecewise_gradients(batch)
    )
    one = torch.ones((), device=device).expand_as(grad)
    expected = backward(torch.ones_like(grad), batch.input, batch.table, 5.0)
    same_bits(list(backward(one, input, table, 5.0)), list(expected))


# Bad input


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("input", Tensor.int, "input: expected dtype float32, float64, bfloat16 or float16, got I"),
        ("table", lambda t: t[:, 0], r"table: expected shape \[K, 2\] or \[K, 4\], got \[6\]"),
        ("table", lambda t: t[:, :1], r"table: expected shape \[K, 2\] or \[K, 4\], got \[6, 1\]"),
        ("table", lambda t: torch.cat([t, t[:, :1]], 1), r"table: expected shape .* got \[6, 3\]"),
        ("table", lambda t: t[:0], r"table: expected 1 to 8388608 intervals, got shape \[0, 2\]"),
        ("table", Tensor.double, "table: expected dtype Float for input of dtype Float, got Doub"),
        ("table", Tensor.bfloat16, "table: expected dtype Float for input of dtype Float, got BF"),
        ("radius", 0.0, "radius: expected a finite number above 0, got 0"),
        ("radius", -1.0, "radius: expected a finite number above 0, got -1"),
        ("radius", math.inf, "radius: expected a finite number above 0, got inf"),
        ("radius", math.nan, "radius: expected a finite number above 0, got nan"),
        ("radius", 1e-300, r"radius: expected K / \(2 radius\) in Float"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_argument(name: str, value: Any, match: str, device: torch.device) -> None:
    batch = piecewise_batch(SMALL, 2, torch.float32).to(device)
    bad = replace(batch, **{name: value(getattr(batch, name)) if callable(value) else value})
    with pytest.raises(RuntimeError, match=f"^hstree::piecewise: {match}"):
        piecewise(*bad.arguments())
    with pytest.raises(RuntimeError, match=f"^hstree::piecewise_backward: {match}"):
        backward(bad.grad, *bad.arguments())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda g: g[1:], r"grad: expected the shape of input, \[5, 4\], got \[4, 4\]"),
        (lambda g: g.view(-1), r"grad: expected the shape of input, \[5, 4\], got \[20\]"),
        (Tensor.double, "grad: expected dtype Float for input of dtype Float, got Double"),
        (Tensor.bfloat16, "grad: expected dtype Float for input of dtype Float, got BFloat16"),
    ],
    ids=["rows", "dim", "float64", "bfloat16"],
)
def test_bad_gradient(value: Any, match: str, device: torch.device) -> None:
    batch = piecewise_batch(SMALL, 2, torch.float32).to(device)
    with pytest.raises(RuntimeError, match=f"^hstree::piecewise_backward: {match}"):
        backward(value(batch.grad), *batch.arguments())


@pytest.mark.cuda
def test_devices_must_agree() -> None:
    batch = piecewise_batch(SMALL, 2, torch.float32)
    with pytest.raises(RuntimeError, match="table: expected the device of input, cuda"):
        piecewise(batch.input.cuda(), batch.table, 5.0)
    with pytest.raises(RuntimeError, match="grad: expected the device of input, cuda"):
        backward(batch.grad, batch.input.cuda(), batch.table.cuda(), 5.0)


@pytest.mark.cuda
@widths
def test_memory_on_cuda(width: int) -> None:
    device = torch.device("cuda")
    x, table = torch.full((24 << 20,), 0.3, device=device), torch.ones(100_000, width).to(device)
    grad = torch.ones_like(x)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(grad, x, table, 20.0)
    assert torch.cuda.max_memory_allocated() - before < (96 + 16) << 20
