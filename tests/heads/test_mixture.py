"""Mixtures: the formulas, what they share with each other, dropout of their latent vectors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from heads.support import (
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
    Head,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    Softmax,
    build_head,
    load_head,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES


def component(head: Any, linear: Any, k: int, hidden: Tensor) -> Tensor:
    """tanh(U_k h + a_k), U_k the k-th block of rows."""
    rows = slice(k * head.latent_features, (k + 1) * head.latent_features)
    return torch.tanh(hidden @ linear.weight[rows].t() + linear.bias[rows])


def logits(head: Any, z: Tensor) -> Tensor:
    product = z @ head.weight.t()
    return product if head.bias is None else product + head.bias


def plif(head: Any, x: Tensor) -> Tensor:
    """Interval by interval: its slope times the way covered in it."""
    slopes, radius = F.softplus(head.function.v), head.function.radius
    width = 2 * radius / len(slopes)
    f = slopes[0] * (x + radius).clamp(max=0) + slopes[-1] * (x - radius).clamp(min=0)
    for j, slope in enumerate(slopes):
        f = f + slope * (x + radius - j * width).clamp(0, width)
    return f


def mos(head: Any, hidden: Tensor, f: Any = lambda head, x: x) -> Tensor:
    log_prior = (hidden @ head.prior.weight.t()).log_softmax(1)
    parts = [
        log_prior[:, k, None]
        + f(head, logits(head, component(head, head.latent, k, hidden))).log_softmax(1)
        for k in range(len(head.prior.weight))
    ]
    return torch.stack(parts).logsumexp(0)


def mos_plif(head: Any, hidden: Tensor) -> Tensor:
    return mos(head, hidden, plif)


def mos_sigsoftmax(head: Any, hidden: Tensor) -> Tensor:
    return mos(head, hidden, lambda head, x: x + F.logsigmoid(x))


def moc(head: Any, hidden: Tensor) -> Tensor:
    prior = (hidden @ head.prior.weight.t()).softmax(1)
    context: Any = sum(
        prior[:, k, None] * component(head, head.latent, k, hidden)
        for k in range(len(head.prior.weight))
    )
    return logits(head, context).log_softmax(1)


FORMULAS: dict[str, tuple[Callable[..., Head], Any]] = {
    "mos": (lambda *size, **more: MixtureOfSoftmaxes(*size, components=3, **more), mos),
    "mos, one": (lambda *size, **more: MixtureOfSoftmaxes(*size, components=1, **more), mos),
    "mos-plif": (
        lambda *size, **more: build_head(
            "mos-plif", *size, components=3, function_options=PIECES, **more
        ),
        mos_plif,
    ),
    "mos, sigsoftmax": (
        lambda *size, **more: MixtureOfSoftmaxes(
            *size, components=2, function="sigsoftmax", **more
        ),
        mos_sigsoftmax,
    ),
    "moc": (lambda *size, **more: MixtureOfContexts(*size, components=3, **more), moc),
}
every_formula = pytest.mark.parametrize("kind", FORMULAS)


@every_formula
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_formula(kind: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and with a bias a few rows at a time: sums over chunks."""
    build, formula = FORMULAS[kind]
    if bias:
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * 3 * 8)
    check_formula(randomise(build(D, V, bias=bias, latent_features=7)), formula)


@every_formula
def test_formula_tied(kind: str) -> None:
    """To an embedding of another size than the context vectors, which sets that of the z."""
    build, formula = FORMULAS[kind]
    embedding = torch.nn.Embedding(V, D + 2).double()
    head: Any = build(D, V, embedding=embedding).double()
    assert head.weight is embedding.weight
    assert head.latent_features == D + 2
    check_formula(randomise(head), formula)


@every_formula
def test_bfloat16(kind: str) -> None:
    build, formula = FORMULAS[kind]
    torch.manual_seed(0)
    check_bfloat16(randomise(build(32, 200, latent_features=32), scale=0.3), formula)


@every_formula
def test_logits_of_ten_thousand(kind: str) -> None:
    """float32 against the formula in float64, priors from 1 to exp(-100) among them."""
    build, formula = FORMULAS[kind]
    head = build(D, V, reduction="none", latent_features=7)
    randomise(head)
    with torch.no_grad():
        head.weight.mul_(2e4)
        head.prior.weight.mul_(20)
    hidden, target = draw(20, D, seed=2).requires_grad_(), draw_targets(20)
    truth, wide = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = formula(truth, wide)
    # An error of 1e-6 in z is one of 0.1 in the log-probability.
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 0.2, "check_dtype": False}
    torch.testing.assert_close(head.log_prob(hidden), expected, **close)
    loss = head(hidden, target).loss
    expected = -expected.gather(1, target[:, None])[:, 0]
    assert expected.max() > 1e3
    torch.testing.assert_close(loss, expected, **close)
    loss.sum().backward()
    expected.sum().backward()
    for p, q in zip([hidden, *head.parameters()], [wide, *truth.parameters()], strict=True):
        error = (p.grad - q.grad).norm()
        assert error <= 0.01 * q.grad.norm()


def same(head: Head, other: Head, size: int = D) -> None:
    """Equal values and gradients; ``other`` reads the last features of what ``head`` reads."""
    hidden, target = draw(20, head.in_features, dtype=torch.float64), draw_targets(20)
    got = []
    for some in (head.double(), other.double()):
        leaf = hidden[:, -some.in_features :].clone().requires_grad_()
        some.zero_grad()
        some(leaf, target).loss.backward()
        names = ["weight", "bias", "prior.weight", "latent.weight", "latent.bias"]
        parameters = dict(some.named_parameters())
        got.append(
            [some.log_prob(leaf), leaf.grad[:, -size:], *(parameters[n].grad for n in names)]
        )
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_one_component_is_one_context() -> None:
    head = randomise(MixtureOfSoftmaxes(D, V, components=1))
    other = MixtureOfContexts(D, V, components=1)
    other.load_state_dict(head.state_dict())
    same(head, other)


def test_equal_components_are_one_softmax() -> None:
    """Whatever the priors: MoS, MoC, and a softmax over tanh(U h + a)."""
    heads: list[Any] = [
        randomise(kind(D, V, components=3, latent_features=4))
        for kind in (MixtureOfSoftmaxes, MixtureOfContexts)
    ]
    for head in heads:
        with torch.no_grad():
            for part in (head.latent.weight, head.latent.bias):
                part.copy_(part[:4].repeat(3, *[1] * (part.dim() - 1)))
    same(*heads)
    plain = Softmax(4, V)
    plain.load_state_dict({name: getattr(heads[0], name) for name in ("weight", "bias")})
    hidden = draw(9, D, dtype=torch.float64)
    z = component(heads[0], heads[0].latent, 0, hidden)
    torch.testing.assert_close(heads[0].log_prob(hidden), plain.double().log_prob(z))


def test_mos_plif_with_slopes_of_1_is_mos() -> None:
    head: Any = randomise(
        MixtureOfSoftmaxes(D, V, components=3, latent_features=7, function="plif")
    ).double()
    with torch.no_grad():
        head.function.v.fill_(math.log(math.e - 1))
    other = MixtureOfSoftmaxes(D, V, components=3, latent_features=7).double()
    state = {k: v for k, v in head.state_dict().items() if not k.startswith("function.")}
    other.load_state_dict(state)
    same(head, other)


def test_mos_plif_is_mos_with_the_function_plif() -> None:
    options: dict[str, Any] = {"components": 2, "function_options": PIECES}
    torch.manual_seed(0)
    named = build_head("mos-plif", D, V, **options)
    torch.manual_seed(0)
    head = MixtureOfSoftmaxes(D, V, function="plif", **options)
    assert named.config() == head.config()
    same(named, head)


def test_a_mixture_exceeds_the_rank_of_its_logits() -> None:
    """What mixtures of softmaxes are for: log-probabilities of higher rank than E + 1."""
    hidden = draw(30, D, dtype=torch.float64)
    for kind, high in ((MixtureOfSoftmaxes, True), (MixtureOfContexts, False)):
        head = randomise(kind(D, V, components=4, latent_features=2), scale=2.0).double()
        log_prob = head.log_prob(hidden).detach()
        rank = torch.linalg.matrix_rank(log_prob - log_prob.mean(1, keepdim=True), atol=1e-6)
        assert (rank > 10) == high
        assert high or rank == 3


def test_frozen_slopes_in_a_mixture() -> None:
    options = {"frozen": True, **PIECES}
    head = MixtureOfSoftmaxes(D, V, components=2, function="plif", function_options=options)
    head(draw(9, D), draw_targets(9)).loss.backward()
    assert head.function.v.grad is None
    grouped = [p for group in head.parameter_groups(lr=0.1) for p in group["params"]]
    assert not any(p is head.function.v for p in grouped)


MIXTURES = {kind: FORMULAS[kind][0] for kind in ("mos", "moc", "mos-plif")}


@pytest.mark.parametrize("kind", MIXTURES)
def test_latent_dropout_is_locked(kind: str) -> None:
    """One mask for all steps, another for each sequence; scaled; off in eval."""
    p = 0.4
    head: Any = randomise(MIXTURES[kind](D, V, latent_features=7, latent_dropout=p))
    hidden = draw(5, 600, D)
    torch.manual_seed(0)
    plain, prior = head.eval().latents(hidden)
    assert torch.equal(plain, head.latents(hidden)[0])
    assert torch.equal(plain[2], head.latents(hidden[2])[0])
    dropped, same_prior = head.train().latents(hidden)
    assert torch.equal(prior, same_prior)
    mask = dropped / plain
    assert (((mask - 1 / (1 - p)).abs() < 1e-5) | (mask == 0)).all()
    torch.testing.assert_close(mask, mask[:1].expand_as(mask), rtol=1e-5, atol=0)
    assert not torch.equal(mask[:, 0] == 0, mask[:, 1] == 0)
    kept = (mask[0] != 0).double()
    # 600 draws for each element: five standard deviations.
    deviation = math.sqrt(p * (1 - p) / 600)
    assert ((kept.mean(0) - (1 - p)).abs() < 5 * deviation).all()
    assert ((kept.t().corrcoef() - torch.eye(kept.shape[1])).abs() < 0.25).all()  # independent
    again = head.latents(hidden)[0]
    assert not torch.equal(again, dropped)
    # Rows without a time dimension have masks of their own.
    rows = head.latents(hidden[0])[0] / plain[0]
    assert not torch.equal(rows[0] == 0, rows[1] == 0)
    assert abs((rows != 0).double().mean() - (1 - p)) < 0.03


@pytest.mark.parametrize("kind", MIXTURES)
def test_latent_dropout_of_a_loss(kind: str) -> None:
    """The loss uses it in training alone; forward and log_prob agree on the same mask."""
    head = randomise(MIXTURES[kind](D, V, latent_features=7, latent_dropout=0.5))
    hidden, target = draw(3, 4, D), draw_targets(3, 4)
    got = []
    for training in (True, False):
        head.train(training)
        torch.manual_seed(1)
        output = head(hidden, target).output
        torch.manual_seed(1)
        log_prob = head.log_prob(hidden).gather(2, target[..., None])[..., 0]
        torch.testing.assert_close(output, log_prob)
        got.append(output)
    assert not torch.allclose(*got)
    twin = MIXTURES[kind](D, V, latent_features=7)
    twin.load_state_dict(head.state_dict())
    torch.testing.assert_close(twin(hidden, target).output, got[1])


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (MixtureOfSoftmaxes, {}),
        (MixtureOfSoftmaxes, {"function": "plif"}),
        (MixtureOfContexts, {}),
        (MixtureOfSoftmaxes, {"function": "gss"}),
        (MixtureOfSoftmaxes, {"function": "monotonic"}),
    ],
    ids=str,
)
def test_initial_values(build: Any, options: dict[str, Any]) -> None:
    """Linear layers of torch for the latent vectors and priors. The unigram distribution where the
    weight is 0."""
    counts = 10.0 ** np.linspace(0, 6, V)
    counts[3] = 0
    torch.manual_seed(0)
    head = build(D, V, frequencies=counts, **options)
    assert head.weight.abs().max() <= 0.1
    bound = D**-0.5
    for values in (head.latent.weight, head.latent.bias, head.prior.weight):
        assert 0.9 * bound < values.abs().max() <= bound
    assert abs(head.latent.bias.mean()) < 0.2 * bound
    assert head.prior.bias is None
    assert head.n_components == 15
    assert head.latent.out_features == 15 * D
    check_unigram(head, counts)


def test_state_dict_names() -> None:
    """Saved files depend on them."""
    names = ["weight", "bias", "latent.weight", "latent.bias", "prior.weight"]
    for build in (MixtureOfSoftmaxes, MixtureOfContexts):
        assert list(build(D, V).state_dict()) == names
    with_function = [*names[:2], "function.v", *names[2:]]
    options: Any = {"function": "plif", "function_options": PIECES}
    assert list(MixtureOfSoftmaxes(D, V, **options).state_dict()) == with_function


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (
            MixtureOfSoftmaxes,
            {"components": 0},
            "components: expected a whole number of at least 1, got 0",
        ),
        (
            MixtureOfSoftmaxes,
            {"latent_features": 0},
            "latent_features: expected a whole number of at least 1, got 0",
        ),
        (
            MixtureOfSoftmaxes,
            {"latent_dropout": 1.0},
            r"latent_dropout: expected a probability in \[0, 1\), got 1.0",
        ),
        (MixtureOfSoftmaxes, {"function": "relu"}, "function: expected one of softmax, .*'relu'"),
        (
            MixtureOfSoftmaxes,
            {"function": "plif", "function_options": {"c": 1.0}},
            "function_options: .*unexpected keyword argument 'c'",
        ),
        (
            MixtureOfSoftmaxes,
            {"embedding": torch.nn.Embedding(V, D), "latent_features": 7},
            r"embedding: expected a weight of shape \(37, 7\) to tie to, got \(37, 10\)",
        ),
        (
            MixtureOfSoftmaxes,
            {"in_features": 0},
            "in_features: expected a whole number of at least 1, got 0",
        ),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_options(build: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**({"in_features": D, "n_classes": V} | options))


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    head = MixtureOfSoftmaxes(
        np.int64(D),
        np.int64(V),
        components=np.int64(2),
        latent_features=np.int32(5),
        latent_dropout=np.float32(0.5),
        function="plif",
        function_options={"intervals": np.int64(7), "radius": np.float64(2)},
    )
    head.save(tmp_path / "head")
    other = load_head(tmp_path / "head")
    assert other.config() == head.config()


def test_sampling_costs_one_component() -> None:
    """No allocation of more classes than one row has, for each row."""
    rows, components, classes = 50, 8, 2000
    head = MixtureOfSoftmaxes(D, classes, components=components)
    hidden = draw(rows, D)
    largest, _ = allocations(lambda: head.sample(hidden))
    assert largest <= rows * classes * 4
    _, everything = allocations(lambda: head.log_prob(hidden))
    _, most = allocations(lambda: head.sample(hidden))
    assert most < everything


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        ("mos", "mean"),
        pytest.param("mos", "none", marks=pytest.mark.slow),
        pytest.param("mos-plif", "mean", marks=pytest.mark.slow),
        ("moc", "none"),
    ],
)
def test_a_step_holds_no_tensor_of_all_logits(
    kind: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even those of one component: N V, of N V K."""
    rows, components, classes = 2000, 8, 1500
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**18)
    options: dict[str, Any] = {"latent_features": 8, "reduction": reduction}
    if kind == "mos-plif":
        options["function_options"] = {"intervals": 1000}
    head = build_head(kind, D, classes, components=components, **options)
    hidden = draw(rows, D).requires_grad_()
    target = draw_targets(rows, n_classes=classes)
    largest, most = allocations(lambda: head(hidden, target).loss.sum().backward())
    assert largest < rows * classes * 4 / 7  # 250 rows, and what rounds them up
    assert most < rows * classes * 4 / 2
