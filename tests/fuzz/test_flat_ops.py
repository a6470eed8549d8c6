"""The operators of flat heads, of functions of the logits, and of the optimizer against their
references in float64."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from reference.mixture_log_prob import mixture_log_prob_reference
from reference.piecewise import piecewise_reference
from reference.sparse_adam import sparse_adam_reference
from reference.target_log_softmax import target_log_softmax_reference
from torch import Tensor

from fuzz.scale import cases
from fuzz.tensors import (
    DTYPES,
    LAYOUTS,
    check_close,
    exact_leaves,
    same_bits,
    sums,
    tensor,
    truth,
)
from fuzz.test_ops import gradients
from hstree import ops

SEEDS = st.integers(0, 2**32 - 1)
HIGH = st.sampled_from([torch.float64, torch.float32])
ANY = st.sampled_from(list(DTYPES.values()))


def increasing_table(intervals: int, width: int, random: np.random.Generator) -> Any:
    """A continuous increasing table with f(-R) = 0."""
    rise = random.uniform(0.1, 2.0, intervals)
    start = np.concatenate([[0.0], rise.cumsum()[:-1]])
    if width == 2:
        return np.stack([start, rise], 1)
    slope = np.minimum(rise.min(), random.uniform(0.1, 2.0, intervals + 1))
    begin, end = slope[:-1], slope[1:]
    return np.stack([start, begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise], 1)


@given(
    seed=SEEDS,
    dtype=HIGH,
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(0, 40),
    classes=st.one_of(st.integers(1, 40), st.sampled_from([129, 1000])),
    curve=st.sampled_from(["identity", "bend", "linear pieces", "cubic pieces"]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    never=st.booleans(),
    bad=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
@settings(max_examples=cases(60))
def test_target_log_softmax(
    seed: int,
    dtype: torch.dtype,
    layout: str,
    rows: int,
    classes: int,
    curve: str,
    scale: float,
    never: bool,
    bad: float | None,
) -> None:
    random = np.random.default_rng(seed)
    target = random.integers(0, classes, rows)
    values = scale * random.standard_normal((rows, classes))
    if never:
        values[random.random(values.shape) < 0.2] = -np.inf
        values[np.arange(rows), target] = 1.0
    c, k = (0.0, 1.0) if curve == "identity" else (random.normal(), random.uniform(0.2, 4.0))
    logits = tensor(values, dtype, layout).requires_grad_()
    table = None
    if curve.endswith("pieces"):
        width = 2 if curve.startswith("linear") else 4
        table = tensor(increasing_table(24, width, random), dtype, layout).requires_grad_()
    target[random.random(rows) < 0.2] = -1
    spoilt = int(random.integers(rows)) if rows and bad is not None else None
    with torch.no_grad():
        if spoilt is not None:
            logits[spoilt, random.integers(classes)] = bad
            if bad == -np.inf:
                logits[spoilt] = bad
    marked = torch.from_numpy(target)
    log_prob = ops.target_log_softmax(logits, marked, c, k, table, 3.0)
    grad = tensor(random.standard_normal(rows), dtype, layout)
    log_prob.backward(grad)
    exact = exact_leaves(logits, table)
    expected = target_log_softmax_reference(exact[0], marked, c, k, exact[1], 3.0)
    of_logits, *of_table = gradients(expected, exact, grad)
    good = np.arange(rows) != spoilt
    # Values of f: a rise of up to 2 for each of 24 intervals, and beyond them.
    size = 1 + 30 * (1 + scale) * max(1.0, abs(k)) + abs(c * (1 - k)) + 48 * (table is not None)
    check_close("log_prob", log_prob.detach(), truth(expected), scale=size)
    check_close("gradient of logits", logits.grad[good], of_logits[good], scale=size * 40)
    if table is not None and spoilt is None:
        assert table.grad is not None
        check_close("gradient of table", table.grad, *of_table, scale=size * 40 * max(1, rows))


NAMES = ("latent", "log_prior", "weight", "bias", "table")


@given(
    seed=SEEDS,
    dtype=ANY,
    layout=st.sampled_from(LAYOUTS),
    rows=st.integers(0, 20),
    components=st.integers(1, 4),
    classes=st.integers(1, 50),
    features=st.integers(1, 12),
    with_bias=st.booleans(),
    with_prior=st.booleans(),
    weighted=st.booleans(),
    curve=st.sampled_from(["identity", "bend", "pieces"]),
    reduction=st.sampled_from(["none", "sum", "mean"]),
    chunk_rows=st.sampled_from([None, 1, 3, 1000]),
    of_log_prob=st.booleans(),
)
@settings(max_examples=cases(60))
def test_mixture_log_prob(
    seed: int,
    dtype: torch.dtype,
    layout: str,
    rows: int,
    components: int,
    classes: int,
    features: int,
    with_bias: bool,
    with_prior: bool,
    weighted: bool,
    curve: str,
    reduction: str,
    chunk_rows: int | None,
    of_log_prob: bool,
) -> None:
    random = np.random.default_rng(seed)

    def draw(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return tensor(random.standard_normal(size), dtype, layout).requires_grad_()

    latent, weight = draw(rows, components, features), draw(classes, features)
    bias = draw(classes) if with_bias else None
    prior = None
    if with_prior or components > 1:
        scores = torch.from_numpy(random.standard_normal((rows, components)))
        prior = tensor(scores.log_softmax(1), sums(dtype), layout).requires_grad_()
    row_weight = tensor(random.uniform(0, 2, rows), sums(dtype)) if weighted else None
    target = random.integers(0, classes, rows)
    target[random.random(rows) < 0.3] = -1
    c, k = (-0.5, 2.5) if curve == "bend" else (0.0, 1.0)
    function, table = ops.LogitFunction(c=c, k=k), None
    if curve == "pieces":
        table = tensor(increasing_table(10, 2, random), sums(dtype)).requires_grad_()
        function = ops.LogitFunction(table=table, radius=2.0)
    log_prob, loss = ops.mixture_log_prob(
        latent, prior, weight, bias, torch.from_numpy(target), function,
        row_weight=row_weight, reduction=reduction, chunk_rows=chunk_rows,
    )  # fmt: skip
    exact = exact_leaves(latent, prior, weight, bias, table)
    of = (c, k, exact[4], 2.0)
    chosen = mixture_log_prob_reference(*exact[:4], torch.from_numpy(target), *of)
    kept = target >= 0
    factor = kept * (1.0 if row_weight is None else truth(row_weight))
    total = factor.sum() if reduction == "mean" else 1.0
    true_loss = -torch.from_numpy(factor) * chosen
    true_loss = true_loss if reduction == "none" else true_loss.sum() / total
    z = truth(latent) @ truth(weight).T + (0 if bias is None else truth(bias))
    # Products of low precision are rounded on the CPU.
    low = torch.finfo(dtype).eps / torch.finfo(sums(dtype)).eps / 8
    size = max(1.0, low) * (4 + 4 * float(np.abs(z).max(initial=0.0)))
    check_close("log_prob", log_prob.detach(), truth(chosen), scale=size)
    check_close("loss", loss.detach(), truth(true_loss), scale=size * max(1, rows))
    output, of_output = (log_prob, chosen) if of_log_prob else (loss, true_loss)
    upstream = tensor(random.standard_normal(output.shape), output.dtype)
    output.backward(upstream)
    largest = float(upstream.abs().max()) if upstream.numel() else 0.0
    if not of_log_prob:
        largest *= float(factor.max(initial=0.0)) / (total if total else 1.0)
        of_output = of_output if total else 0 * chosen.sum()  # the mean over no rows: no gradient
    size *= 10 * (1 + rows) * (1 + largest)
    leaves = (latent, prior, weight, bias, table)
    names = [name for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None]
    given_ = [leaf for leaf in leaves if leaf is not None]
    true = gradients(of_output, exact, upstream)
    for name, leaf, expected in zip(names, given_, true, strict=True):
        if leaf is not table or dtype in (torch.float32, torch.float64):
            assert leaf.grad is not None
            check_close(f"gradient of {name}", leaf.grad, expected, scale=size)


@given(
    seed=SEEDS,
    dtype=ANY,
    shape=st.sampled_from([(7,), (5, 3), (4, 6, 9), (3, 40, 17), (2, 5, 1)]),
    deep=st.booleans(),
    visited=st.floats(0, 1),
    step=st.sampled_from([1, 2, 10, 10**6]),
    lr=st.sampled_from([0.0, 1e-3, 2.0]),
    beta1=st.sampled_from([0.0, 0.9]),
    beta2=st.sampled_from([0.0, 0.999]),
    decay=st.sampled_from([0.0, 0.1]),
    maximize=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
)
@settings(max_examples=cases(40))
def test_sparse_adam(
    seed: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    deep: bool,
    visited: float,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    decay: float,
    maximize: bool,
    scale: float,
) -> None:
    random = np.random.default_rng(seed)
    dimensions = 2 if deep and len(shape) > 1 else 1
    weight = tensor(random.standard_normal(shape), dtype)
    m = tensor(random.standard_normal(shape), sums(dtype))
    v = tensor(random.uniform(0, 2, shape), sums(dtype))
    index = np.argwhere(random.random(shape[:dimensions]) < visited).T
    values = tensor(scale * random.standard_normal((index.shape[1], *shape[dimensions:])), dtype)
    place = torch.from_numpy(np.ascontiguousarray(index))
    true = [x.double().clone() for x in (weight, m, v)]
    options: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    options |= {"step": step, "weight_decay": decay, "maximize": maximize}
    sparse_adam_reference(*true, place, values.double(), **options)
    size = 2 + 2 * float((true[0] - weight).abs().max())
    ops.sparse_adam_(weight, m, v, place, values, **options)
    for name, got, expected in zip(("weight", "m", "v"), (weight, m, v), true, strict=True):
        check_close(name, got, truth(expected), scale=size)


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
    leaves = [x.detach().requires_grad_(), table.detach().requires_grad_()]
    value = ops.piecewise(*leaves, radius)
    grad = tensor(random.standard_normal(shape), dtype, layout)
    value.backward(grad)
    size = 8 * float(np.abs(truth(table)).max()) * (intervals + 3)
    exact = exact_leaves(*leaves)
    expected = piecewise_reference(*exact, radius)
    of_x, of_table = gradients(expected, exact, grad)
    check_close("value", value.detach(), truth(expected), scale=size)
    check_close("gradient of input", leaves[0].grad, of_x, scale=size / step)
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
    true = truth(piecewise_reference(x.double(), table.detach().double(), radius))
    check_close("value", value, true, scale=float(rise.max()) * (intervals + 3))
