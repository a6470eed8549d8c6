"""The operators of flat heads and of the optimizer against float64 formulas."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from torch import Tensor

from fuzz.curves import Bend, Pieces, increasing_table
from fuzz.scale import cases
from fuzz.tensors import DTYPES, LAYOUTS, check_close, sums, tensor, truth
from fuzz.truth import log_softmax, log_sum_exp
from hstree import ops

SEEDS = st.integers(0, 2**32 - 1)
HIGH = st.sampled_from([torch.float64, torch.float32])
ANY = st.sampled_from(list(DTYPES.values()))


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
    f: Any = Bend(c, k)
    table = None
    if curve.endswith("pieces"):
        width = 2 if curve.startswith("linear") else 4
        table = tensor(increasing_table(24, width, random), dtype, layout).requires_grad_()
        f = Pieces(truth(table), 3.0)
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
    x = truth(logits)
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        value = np.where(finite, f.value(np.where(finite, x, 0.0)), x)
        every = log_softmax(value)
    kept = target >= 0
    expected = np.where(kept, every[np.arange(rows), target], 0.0)
    good = np.ones(rows, bool)
    if spoilt is not None:
        good[spoilt] = False
        expected[spoilt] = np.nan if kept[spoilt] else 0.0
    size = 1 + float(np.abs(np.where(finite, value, 0.0)).max(initial=0.0)) + 10 * scale
    check_close("log_prob", log_prob.detach(), expected, scale=size)
    of_value = -np.exp(every)
    of_value[np.flatnonzero(kept), target[kept]] += 1
    of_value *= (truth(grad) * kept)[:, None]
    slope = np.where(finite, f.slope(np.where(finite, x, 0.0)), 0.0)
    of_logits = np.where(finite, of_value, 0.0) * slope
    check_close("gradient of logits", logits.grad[good], of_logits[good], scale=size * 40)
    if table is not None and spoilt is None:
        inside = np.where(finite, of_value, 0.0)
        of_table = f.table_gradient(np.where(finite, x, 0.0), inside)
        assert table.grad is not None
        check_close("gradient of table", table.grad, of_table, scale=size * 40 * max(1, rows))


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
        prior = log_softmax(random.standard_normal((rows, components)))
        prior = tensor(prior, sums(dtype), layout).requires_grad_()
    row_weight = tensor(random.uniform(0, 2, rows), sums(dtype)) if weighted else None
    target = random.integers(0, classes, rows)
    target[random.random(rows) < 0.3] = -1
    function, f = ops.LogitFunction(), Bend(0.0, 1.0)
    if curve == "bend":
        function, f = ops.LogitFunction(c=-0.5, k=2.5), Bend(-0.5, 2.5)
    table = None
    if curve == "pieces":
        table = tensor(increasing_table(10, 2, random), sums(dtype)).requires_grad_()
        function, f = ops.LogitFunction(table=table, radius=2.0), Pieces(truth(table), 2.0)
    log_prob, loss = ops.mixture_log_prob(
        latent, prior, weight, bias, torch.from_numpy(target), function,
        row_weight=row_weight, reduction=reduction, chunk_rows=chunk_rows,
    )  # fmt: skip
    z = truth(latent) @ truth(weight).T + (0 if bias is None else truth(bias))
    every = log_softmax(f.value(z))
    kept = target >= 0
    joint = every[np.arange(rows), :, target] + (0 if prior is None else truth(prior))
    chosen = np.where(kept, log_sum_exp(joint), 0.0)
    factor = kept * (1.0 if row_weight is None else truth(row_weight))
    total = factor.sum() if reduction == "mean" else 1.0
    true_loss = -factor * chosen
    with np.errstate(invalid="ignore"):
        true_loss = true_loss if reduction == "none" else true_loss.sum() / total
    # Products of low precision are rounded on the CPU.
    low = torch.finfo(dtype).eps / torch.finfo(sums(dtype)).eps / 8
    size = max(1.0, low) * (4 + 4 * float(np.abs(z).max(initial=0.0)))
    check_close("log_prob", log_prob.detach(), chosen, scale=size)
    check_close("loss", loss.detach(), true_loss, scale=size * max(1, rows))
    if of_log_prob:
        upstream = tensor(random.standard_normal(rows), log_prob.dtype)
        log_prob.backward(upstream)
        of_row = truth(upstream) * kept
    else:
        upstream = tensor(random.standard_normal(loss.shape), loss.dtype)
        loss.backward(upstream)
        of_row = -factor * truth(upstream) / (total if total else 1.0)
    share = np.exp(joint - log_sum_exp(joint)[:, None]) * of_row[:, None]
    of_value = -np.exp(every) * share[:, :, None]
    of_value[np.flatnonzero(kept), :, target[kept]] += share[kept]
    of_z = of_value * f.slope(z)
    true = {
        "latent": (latent, of_z @ truth(weight)),
        "weight": (weight, np.einsum("nkv,nkd->vd", of_z, truth(latent))),
        "bias": (bias, of_z.sum((0, 1))),
        "log_prior": (prior, share),
    }
    size *= 10 * (1 + rows) * (1 + float(np.abs(of_row).max(initial=0.0)))
    for name, (leaf, expected) in true.items():
        if leaf is not None:
            assert leaf.grad is not None
            check_close(f"gradient of {name}", leaf.grad, expected, scale=size)
    if table is not None and dtype in (torch.float32, torch.float64):
        check_close("gradient of table", table.grad, f.table_gradient(z, of_value), scale=size)


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
    before = [truth(x).copy() for x in (weight, m, v)]
    ops.sparse_adam_(
        weight, m, v, torch.from_numpy(np.ascontiguousarray(index)), values, step=step, lr=lr,
        beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=decay, maximize=maximize,
    )  # fmt: skip
    w, first, second = before
    at = tuple(index)
    g = -truth(values) if maximize else truth(values)
    first[at] = beta1 * first[at] + (1 - beta1) * g
    second[at] = beta2 * second[at] + (1 - beta2) * g**2
    move = first[at] / (1 - beta1**step)
    move /= np.sqrt(second[at] / (1 - beta2**step)) + 1e-8
    w[at] = (1 - lr * decay) * w[at] - lr * move
    size = 1 + lr * float(np.abs(move).max(initial=0.0))
    for name, got, true in zip(("weight", "m", "v"), (weight, m, v), before, strict=True):
        check_close(name, got, true, scale=size)
