"""Functions of the logits against float64 formulas."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings

from fuzz.curves import Pieces, increasing_table
from fuzz.scale import cases
from fuzz.tensors import DTYPES, LAYOUTS, check_close, same_bits, sums, tensor, truth
from hstree import ops

SEEDS = st.integers(0, 2**32 - 1)
HIGH = st.sampled_from([torch.float64, torch.float32])
ANY = st.sampled_from(list(DTYPES.values()))


@given(
    seed=SEEDS,
    dtype=ANY,
    layout=st.sampled_from(LAYOUTS),
    shape=st.sampled_from([(), (0,), (7,), (3, 5), (40, 50), (2, 0, 3)]),
    intervals=st.one_of(st.integers(1, 40), st.sampled_from([64, 1000, 2**14])),
    width=st.sampled_from([2, 4]),
    radius=st.sampled_from([1.0, 4.0, 20.0, 1e-3]),
    continuous=st.booleans(),
)
@settings(max_examples=cases(40))
def test_piecewise(
    seed: int,
    dtype: torch.dtype,
    layout: str,
    shape: tuple[int, ...],
    intervals: int,
    width: int,
    radius: float,
    continuous: bool,
) -> None:
    random = np.random.default_rng(seed)
    table = random.standard_normal((intervals, width))
    if continuous:
        table = increasing_table(intervals, width, random)
    table = tensor(table, sums(dtype), layout)
    place = random.integers(-2, intervals + 2, shape) + random.uniform(0.0, 1.0, shape)
    x = tensor(2 * radius * place / intervals - radius, dtype, layout)
    # Within a rounding of a knot either interval is right: choose other places.
    step = 2 * radius / intervals
    t = (truth(x) + radius) / step
    near = np.abs(t - np.round(t)) < 64 * torch.finfo(sums(dtype)).eps * (intervals + 1)
    x = x.masked_fill(torch.from_numpy(np.asarray(near)), -2 * radius)
    pieces = Pieces(truth(table), radius)
    leaves = [x.detach().requires_grad_(), table.detach().requires_grad_()]
    value = ops.piecewise(*leaves, radius)
    grad = tensor(random.standard_normal(shape), dtype, layout)
    value.backward(grad)
    size = 8 * float(np.abs(truth(table)).max()) * (intervals + 3)
    check_close("value", value.detach(), pieces.value(truth(x)), scale=size)
    of_x = truth(grad) * pieces.slope(truth(x))
    check_close("gradient of input", leaves[0].grad, of_x, scale=size / step)
    of_table = pieces.table_gradient(truth(x), truth(grad))
    many = 8 * max(1, x.numel()) * (intervals + 3)
    check_close("gradient of table", leaves[1].grad, of_table, scale=many)
    again = [t.detach().requires_grad_() for t in leaves]
    ops.piecewise(*again, radius).backward(grad)
    assert all(same_bits(a.grad, b.grad) for a, b in zip(leaves, again, strict=True))


@given(seed=SEEDS, dtype=ANY, layout=st.sampled_from(LAYOUTS), log_intervals=st.integers(0, 8))
@settings(max_examples=cases(15))
def test_piecewise_at_knots_and_infinities(
    seed: int, dtype: torch.dtype, layout: str, log_intervals: int
) -> None:
    """A knot belongs to the interval on its right; infinities continue the end slopes."""
    random = np.random.default_rng(seed)
    intervals = 2 ** min(log_intervals, 6 if dtype == torch.bfloat16 else 8)
    table = tensor(random.integers(-8, 9, (intervals, 2)), sums(dtype), layout)
    knots = np.arange(intervals + 1) * (2 * 4.0 / intervals) - 4.0
    x = tensor([*knots, np.inf, -np.inf, np.nan], dtype, layout)
    value = ops.piecewise(x, table, 4.0)
    rows = truth(table)
    with np.errstate(invalid="ignore"):
        ends = [rows[-1, 1] * np.inf, rows[0, 1] * -np.inf, np.nan]
    expected = np.array([*rows[:, 0], rows[-1].sum(), *ends])
    np.testing.assert_array_equal(truth(value), expected)


@given(
    seed=SEEDS,
    dtype=HIGH,
    intervals=st.one_of(st.integers(1, 50), st.just(20_000)),
    radius=st.sampled_from([0.5, 20.0]),
    spread=st.sampled_from([0.0, 1.0, 6.0]),
)
@settings(max_examples=cases(15))
def test_plif(seed: int, dtype: torch.dtype, intervals: int, radius: float, spread: float) -> None:
    random = np.random.default_rng(seed)
    slopes = tensor(np.exp(spread * random.standard_normal(intervals)), dtype).requires_grad_()
    table = ops.plif_table(slopes, radius)
    rise = truth(slopes) * 2 * radius / intervals
    expected = np.stack([rise.cumsum(dtype=np.longdouble) - rise, rise], 1).astype(float)
    unit = float(rise.max()) * intervals  # knots are sums of integers in units of it
    check_close("table", table.detach(), expected, scale=unit, roundings=8 + intervals / 1000)
    grad = tensor(random.standard_normal((intervals, 2)), dtype)
    table.backward(grad)
    of_knots = truth(grad)[:, 0]
    of_rise = of_knots[::-1].cumsum()[::-1] - of_knots + truth(grad)[:, 1]
    of_slopes = of_rise * 2 * radius / intervals
    check_close("gradient of slopes", slopes.grad, of_slopes, scale=float(intervals))
    x = tensor(radius * random.uniform(-1.2, 1.2, 30), dtype)
    value = ops.plif(x, slopes.detach(), radius)
    true = Pieces(truth(table), radius).value(truth(x))
    check_close("value", value, true, scale=float(rise.max()) * (intervals + 3))
