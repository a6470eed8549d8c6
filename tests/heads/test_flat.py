"""Heads with one softmax: the formulas, from plain logits to a monotonic network of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.support import (
    FREQUENCIES,
    PIECES,
    D,
    V,
    allocations,
    check_bfloat16,
    check_formula,
    check_unigram,
    draw,
    draw_targets,
    randomise,
)
from hstree.heads import (
    GSS,
    PLIF,
    ForestSoftmax,
    Head,
    MonotonicNetwork,
    SampledSoftmax,
    SigSoftmax,
    Softmax,
    TreeEnsemble,
    build_head,
    load_head,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES
from hstree.trees import build_ensemble


def logits(head: Any, hidden: Tensor) -> Tensor:
    product = hidden @ head.weight.t()
    return product if head.bias is None else product + head.bias


def softmax(head: Any, hidden: Tensor) -> Tensor:
    return logits(head, hidden).log_softmax(1)


def capped(head: Any, hidden: Tensor) -> Tensor:
    return (2 * (0.7 * logits(head, hidden) / 2).tanh()).log_softmax(1)


def sigsoftmax(head: Any, hidden: Tensor) -> Tensor:
    """exp(l) sigmoid(l), normalised."""
    x = logits(head, hidden)
    p = x.exp() * x.sigmoid()
    return (p / p.sum(1, keepdim=True)).log()


def gss(head: Any, hidden: Tensor) -> Tensor:
    x, c, k = logits(head, hidden), head.function.c, head.function.k
    return (k * (x - c) + c - (k - 1) * F.softplus(x - c)).log_softmax(1)


def integral(head: Any, x: Tensor) -> Tensor:
    """Of the slopes: each interval adds its slope times the way covered in it."""
    slopes, radius = F.softplus(head.function.v), head.function.radius
    width = 2 * radius / len(slopes)
    begin = -radius + width * torch.arange(len(slopes), dtype=x.dtype)
    f = ((x[..., None] - begin).clamp(0, width) * slopes).sum(-1)
    f = f + slopes[0] * (x + radius).clamp(max=0)
    return f + slopes[-1] * (x - radius).clamp(min=0)


def plif(head: Any, hidden: Tensor) -> Tensor:
    return integral(head, logits(head, hidden)).log_softmax(1)


def monotonic(head: Any, hidden: Tensor) -> Tensor:
    f, x = head.function, logits(head, hidden)
    hidden_units = torch.sigmoid(F.softplus(f.u) * x[..., None] + f.b)
    return (hidden_units * F.softplus(f.v)).sum(-1).log_softmax(1)


FORMULAS: dict[str, tuple[Callable[..., Head], Any]] = {
    "softmax": (Softmax, softmax),
    "softmax, scaled and capped": (
        lambda *size, **more: Softmax(*size, scale=0.7, soft_cap=2.0, **more),
        capped,
    ),
    "sigsoftmax": (SigSoftmax, sigsoftmax),
    "gss": (GSS, gss),
    "plif": (lambda *size, **more: PLIF(*size, **PIECES, **more), plif),
    "plif-frozen": (lambda *size, **more: build_head("plif-frozen", *size, **PIECES, **more), plif),
    "plif, one interval": (
        lambda *size, **more: PLIF(*size, intervals=1, radius=1.0, **more),
        plif,
    ),
    "monotonic": (
        lambda *size, **more: MonotonicNetwork(*size, units=9, intervals=40_000, **more),
        monotonic,
    ),
}
# The derivative of an interpolation at knots h apart is up to h^3 max |f''''| / 125 off.
INTERPOLATED = ("monotonic", "softmax, scaled and capped")
TOLERANCE = {kind: 3e-9 if kind in INTERPOLATED else 1e-11 for kind in FORMULAS}
every_formula = pytest.mark.parametrize("kind", FORMULAS)


@every_formula
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_formula(kind: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and with a bias a few rows at a time: sums over chunks."""
    build, formula = FORMULAS[kind]
    if bias:
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * 8)
    check_formula(randomise(build(D, V, bias=bias)), formula, atol=TOLERANCE[kind])


@every_formula
def test_formula_tied(kind: str) -> None:
    """The embedding gets the gradient of both of its uses."""
    build, formula = FORMULAS[kind]
    embedding = torch.nn.Embedding(V, D).double()
    head: Any = build(D, V, embedding=embedding).double()
    assert head.weight is embedding.weight
    check_formula(randomise(head), formula, atol=TOLERANCE[kind])
    head, target = head.double(), draw_targets(6)
    got = torch.autograd.grad(head(embedding(target), target).loss.mean(), embedding.weight)
    loss = F.nll_loss(formula(head, embedding.weight[target]), target)
    expected = torch.autograd.grad(loss, embedding.weight)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=TOLERANCE[kind])


@every_formula
def test_bfloat16(kind: str) -> None:
    build, formula = FORMULAS[kind]
    torch.manual_seed(0)
    check_bfloat16(randomise(build(32, 200), scale=0.3), formula)


@every_formula
def test_logits_of_ten_thousand(kind: str) -> None:
    """float32 against the formula in float64: no overflow, no gradient lost."""
    build, formula = FORMULAS[kind]
    head = build(D, V, reduction="none")
    with torch.no_grad():
        head.weight.copy_(4000 * draw(V, D))
        head.bias.copy_(draw(V, seed=5))
    hidden, target = draw(20, D, seed=2).requires_grad_(), draw_targets(20)
    truth, wide = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    assert logits(head, hidden).abs().max() > 1e4
    if "sigsoftmax" in kind:  # exp(l) overflows in float64 too
        formula = lambda head, hidden: (  # noqa: E731
            2 * logits(head, hidden) - F.softplus(logits(head, hidden))
        ).log_softmax(1)
    expected = formula(truth, wide)
    torch.testing.assert_close(
        head.log_prob(hidden), expected, rtol=2e-6, atol=1e-2, check_dtype=False
    )
    loss = head(hidden, target).loss
    expected = -expected.gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=1e-2, check_dtype=False)
    loss.sum().backward()
    expected.sum().backward()
    for p, q in zip([hidden, *head.parameters()], [wide, *truth.parameters()], strict=True):
        if p.requires_grad:
            close = {"rtol": 1e-3, "atol": 1e-3 * q.grad.abs().max().item()}
            torch.testing.assert_close(p.grad, q.grad, **close, check_dtype=False)


def same(head: Head, other: Head) -> None:
    """Equal values and gradients of what both have."""
    hidden, target = draw(20, D, dtype=torch.float64).requires_grad_(), draw_targets(20)
    got = []
    for some in (head.double(), other.double()):
        some.zero_grad()
        hidden.grad = None
        log_prob = some.log_prob(hidden)
        some(hidden, target).loss.backward()
        got.append([log_prob, hidden.grad, some.weight.grad, some.bias.grad])
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def filled(head: Head) -> Any:
    """With the weight and bias that all get."""
    with torch.no_grad():
        head.weight.copy_(draw(V, D))
        head.bias.copy_(draw(V, seed=1))
    return head


def test_gss_is_sigsoftmax_at_0_2_and_softmax_at_k_1() -> None:
    same(filled(GSS(D, V, c=0.0, k=2.0)), filled(SigSoftmax(D, V)))
    same(filled(GSS(D, V, c=-1.5, k=1.0)), filled(Softmax(D, V)))


@pytest.mark.parametrize(
    "options", [{}, PIECES, {"intervals": 7, "radius": 0.01}, {"intervals": 1}], ids=str
)
def test_plif_with_slopes_of_1_is_softmax(options: dict[str, Any]) -> None:
    head = filled(PLIF(D, V, **options)).double()
    with torch.no_grad():
        head.function.v.fill_(math.log(math.e - 1))
    same(head, filled(Softmax(D, V)))


def test_plif_defaults() -> None:
    head = PLIF(D, V)
    v = head.function.v.detach()
    assert (v.shape, head.function.radius) == ((100_000,), 20.0)
    assert abs(v.mean() - math.log(math.e - 1)) < 0.02
    assert abs(v.std() - 1) < 0.02
    assert v.requires_grad is False  # detached
    assert head.function.v.requires_grad
    function = GSS(D, V).function
    assert (function.c, function.k) == (-1.5, 2.5)
    assert len(MonotonicNetwork(D, V).function.u) == 1000


def test_frozen_slopes(tmp_path: Path) -> None:
    """No gradient and no step, but saved and copied."""
    head = PLIF(D, V, **PIECES, frozen=True)
    v = head.function.v.detach().clone()
    head(draw(9, D), draw_targets(9)).loss.backward()
    assert head.function.v.grad is None
    assert head.weight.grad.any()
    groups = head.parameter_groups(lr=0.1)
    assert [[p.shape for p in g["params"]] for g in groups] == [[(V, D)], [(V,)]]
    head.save(tmp_path / "head")
    for other in (load_head(tmp_path / "head"), copy.deepcopy(head)):
        assert isinstance(other, PLIF)
        assert torch.equal(other.function.v, v)
        assert not other.function.v.requires_grad


def test_state_dict_names() -> None:
    """Saved files depend on them."""
    assert list(Softmax(D, V).state_dict()) == ["weight", "bias"]
    assert list(Softmax(D, V, bias=False).state_dict()) == ["weight"]
    for kind in (SigSoftmax, GSS):
        assert list(kind(D, V).state_dict()) == ["weight", "bias"]
    assert list(PLIF(D, V, **PIECES).state_dict()) == ["weight", "bias", "function.v"]
    names = ["weight", "bias", "function.u", "function.v", "function.b"]
    assert list(MonotonicNetwork(D, V).state_dict()) == names


@pytest.mark.parametrize("build", [Softmax, SigSoftmax, GSS, PLIF, MonotonicNetwork])
def test_initial_values(build: Any) -> None:
    head = build(D, V)
    assert head.weight.abs().max() <= 0.1
    assert 0.05 < head.weight.std() < 0.065  # uniform in [-0.1, 0.1]: 0.058
    wide = build(1024, V).weight
    assert 0.049 < wide.abs().max() <= 0.05  # 1.6 / 32
    assert not head.bias.any()
    assert build(D, V, bias=False).bias is None
    counts = 10.0 ** np.linspace(0, 6, V)
    counts[3] = 0
    check_unigram(build(D, V, frequencies=counts), counts)


def test_untrained_gradient_does_not_vanish() -> None:
    """The bias that gives the unigram distribution stays where f has a slope."""
    counts = 1e6 / np.arange(1, V + 1) ** 2
    for build in (GSS, PLIF, MonotonicNetwork):
        head = build(D, V, frequencies=counts)
        head(torch.zeros(V, D), torch.arange(V)).loss.backward()
        plain = Softmax(D, V, frequencies=counts)
        plain(torch.zeros(V, D), torch.arange(V)).loss.backward()
        ratio = head.bias.grad / plain.bias.grad
        assert ratio.min() > 0.01
        assert ratio.max() < 6


@pytest.mark.parametrize(
    ("frequencies", "match"),
    [
        (np.ones(V - 1), r"frequencies: expected .* shape \(37,\), got shape \(36,\)"),
        (np.full(V, -1.0), r"frequencies\[0\]: expected a finite number of at least 0, got -1.0"),
        (
            np.array([1.0] * (V - 1) + [np.nan]),
            r"frequencies\[36\]: expected a finite number .*, got nan",
        ),
        (np.full(V, 1e308), "frequencies: expected a finite sum, got inf"),
        ([[1.0]] + [[2.0, 3.0]] * (V - 1), "frequencies: expected a 1-D array of numbers: "),
        (np.ones(V, bool), "frequencies: expected real numbers, got dtype bool"),
        (np.ones(V, object), "frequencies: expected real numbers, got dtype object"),
        (torch.ones(V, dtype=torch.bool), "frequencies: expected real numbers, got dtype bool"),
    ],
    ids=["shape", "negative", "nan", "sum", "ragged", "bool", "object", "bool tensor"],
)
def test_bad_frequencies(frequencies: Any, match: str) -> None:
    """In every head and recipe alike."""
    error = TypeError if "dtype" in match else ValueError
    trees = build_ensemble("random", V, 1)
    builds = [partial(build, D, V) for build in (Softmax, GSS, PLIF, SampledSoftmax)]
    builds.append(partial(TreeEnsemble, D, V, trees))
    builds += [partial(build_ensemble, name, V, 1) for name in ("random", "huffman", "cluster")]
    for build in builds:
        with pytest.raises(error, match=match):
            build(frequencies=frequencies)


def test_frequencies_of_all_magnitudes() -> None:
    counts = np.array([1e308, 1.0, 1e-300, 0.0])
    expected = torch.tensor([0.0, -308, -608, -608]) * math.log(10)
    expected[3] -= math.log(2)
    for given in (counts, torch.from_numpy(counts).requires_grad_()):
        torch.testing.assert_close(Softmax(D, 4, frequencies=given).bias.detach(), expected)
    head = Softmax(D, 4, frequencies=torch.tensor([1, 2, 3, 4]).bfloat16())
    torch.testing.assert_close(head.bias.detach().exp(), torch.tensor([0.1, 0.2, 0.3, 0.4]))


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (GSS, {"k": 0.0}, "k: expected a finite positive number, got 0.0"),
        (GSS, {"c": math.nan}, "c: expected a finite number, got nan"),
        (GSS, {"k": "2"}, "k: expected a finite positive number, got '2'"),
        (PLIF, {"intervals": 12.5}, "intervals: expected a whole number from 1 to 16777216"),
        (PLIF, {"radius": 0.0}, "radius: expected a finite positive number, got 0.0"),
        (MonotonicNetwork, {"units": 0}, "units: expected a whole number from 1 to 16777216"),
        (
            MonotonicNetwork,
            {"intervals": 0},
            "intervals: expected a whole number from 1 to 16777216",
        ),
        (
            Softmax,
            {"embedding": torch.nn.Embedding(V, D + 1)},
            r"embedding: expected a weight of shape \(37, 10\) to tie to, got \(37, 11\)",
        ),
        (Softmax, {"embedding": torch.ones(V, D)}, "embedding: .* to tie to, got Tensor"),
        (Softmax, {"bias": None}, "bias: expected True or False, got None"),
        (Softmax, {"n_classes": 2**63}, "n_classes: expected a whole number from 1 to"),
        (PLIF, {"radius": 1e308}, "radius: expected a number from 1e-6 to 1e6, got 1e\\+308"),
        (Softmax, {"in_features": 0}, "in_features: expected a whole number of at least 1, got 0"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_options(build: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**({"in_features": D, "n_classes": V} | options))


def test_no_counts_at_all_are_all_equal() -> None:
    head = Softmax(D, V, frequencies=np.zeros(V))
    np.testing.assert_allclose(head.bias.detach().numpy(), -np.log(V), rtol=1e-6)


@every_formula
def test_one_class(kind: str) -> None:
    head = FORMULAS[kind][0](D, 1)
    output = head(draw(3, D), torch.zeros(3, dtype=torch.int64)).output
    torch.testing.assert_close(output, torch.zeros(3), rtol=0, atol=1e-6)
    assert not head.log_prob(draw(3, D)).any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Softmax, SampledSoftmax, ForestSoftmax])
def test_from_linear(kind: Any, tied: bool, bias: bool) -> None:
    """The softmax of the layer, in its dtype; its weight itself only if tied."""
    linear, hidden = torch.nn.Linear(D, V, bias=bias).double(), draw(9, D).double()
    head = kind.from_linear(linear, tied=tied, reduction="sum", frequencies=FREQUENCIES)
    expected = linear(hidden).log_softmax(1)
    torch.testing.assert_close(head.log_prob(hidden), expected, rtol=0, atol=1e-12)
    assert (head.weight is linear.weight) == head.tied == tied
    assert (head.bias is None) == (not bias)
    assert head.bias is not linear.bias or not bias
    assert (head.reduction, head.weight.dtype) == ("sum", torch.float64)
    for name in ("bias", "embedding"):
        with pytest.raises(ValueError, match=f"{name}: expected that of linear, got None"):
            kind.from_linear(linear, **{name: None})
    with pytest.raises(TypeError, match="label_smooth"):
        kind.from_linear(linear, label_smooth=0.1, frequencies=FREQUENCIES)


@pytest.mark.parametrize("kind", ["softmax", "gss", "plif", "monotonic"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_step_holds_no_tensor_of_all_logits(
    kind: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, features, classes = 2000, 16, 1500
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**18)
    options: dict[str, Any] = {
        "plif": {"intervals": 1000},
        "monotonic": {"units": 9, "intervals": 512},
    }.get(kind, {})
    build: Any = {"softmax": Softmax, "gss": GSS, "plif": PLIF, "monotonic": MonotonicNetwork}
    head = build[kind](features, classes, reduction=reduction, **options)
    hidden = draw(rows, features).requires_grad_()
    target = draw_targets(rows, n_classes=classes)
    largest, most = allocations(lambda: head(hidden, target).loss.sum().backward())
    assert largest < rows * classes * 4 / 7  # 250 rows, and what rounds them up
    assert most < rows * classes * 4 / 2
    _, eager = allocations(lambda: F.cross_entropy(logits(head, hidden), target).backward())
    assert eager > rows * classes * 4  # what the measurement says where all logits are held
