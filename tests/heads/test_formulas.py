"""Heads with one row of weights for each class, against their formulas, from plain logits to
mixtures of a network of them; and what they share with each other."""

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

from heads.formulas import (
    FORMULAS,
    latents,
    logits,
    priors_of_mixtape,
)
from heads.support import (
    FREQUENCIES,
    ORDER,
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
    Mixtape,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    MonotonicNetwork,
    SampledSoftmax,
    SigSoftmax,
    Softmax,
    TreeEnsemble,
    build_head,
    load_head,
)
from hstree.heads.state import EXTRA_STATE, saved_tables
from hstree.ops.mixture_log_prob import CHUNK_BYTES
from hstree.trees import build_ensemble


def of_mixtape(*size: int, own_gates: int | None = 15, **options: Any) -> Mixtape:
    """For 37 classes or more."""
    order = ORDER if size[1] == V else None
    return Mixtape(*size, own_gates=own_gates, gate_features=4, **{"order": order} | options)


# A monotonic network and a cap are interpolated: derivatives at knots h apart are up to
# h^3 max |f''''| / 125 off.
KINDS: dict[str, tuple[Callable[..., Any], float]] = {
    "softmax": (Softmax, 1e-11),
    "softmax, scaled and capped": (partial(Softmax, scale=0.7, soft_cap=2.0), 3e-9),
    "sigsoftmax": (SigSoftmax, 1e-11),
    "gss": (GSS, 1e-11),
    "plif": (partial(PLIF, **PIECES), 1e-11),
    "plif-frozen": (partial(build_head, "plif-frozen", **PIECES), 1e-11),
    "plif, one interval": (partial(PLIF, intervals=1, radius=1.0), 1e-11),
    "monotonic": (partial(MonotonicNetwork, units=9, intervals=40_000), 3e-9),
    "mos": (partial(MixtureOfSoftmaxes, components=3), 1e-11),
    "mos, one": (partial(MixtureOfSoftmaxes, components=1), 1e-11),
    "mos-plif": (partial(build_head, "mos-plif", components=3, function_options=PIECES), 1e-11),
    "mos, sigsoftmax": (
        partial(MixtureOfSoftmaxes, components=2, function="sigsoftmax"),
        1e-11,
    ),
    "moc": (partial(MixtureOfContexts, components=3), 1e-11),
    "mixtape": (of_mixtape, 1e-11),
    "mixtape, one with gates": (partial(of_mixtape, own_gates=1), 1e-11),
    "mixtape, none with gates": (partial(of_mixtape, own_gates=0), 1e-11),
    "mixtape, all with gates": (partial(of_mixtape, own_gates=V), 1e-11),
}
MIXED = ("mos", "moc", "mixtape")  # begin with latent vectors
MORE_CLASSES = ("mixtape", "mixtape, all with gates")  # which have gates for more than one
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str, *size: int, latent: int = 7, **options: Any) -> Any:
    """``latent``: features of latent vectors, unless an embedding says how many."""
    if kind.startswith(MIXED) and "embedding" not in options:
        options["latent_features"] = latent
    return KINDS[kind][0](*(size or (D, V)), **options)


def formula_of(kind: str) -> Any:
    return FORMULAS[kind.partition(",")[0]]


@every_kind
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_formula(kind: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and with a bias a few rows at a time: sums over chunks."""
    if bias:
        monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * (3 if kind.startswith("mos") else 1) * 8)
    check_formula(randomise(build(kind, bias=bias)), formula_of(kind), atol=KINDS[kind][1])


@every_kind
def test_formula_tied(kind: str) -> None:
    """The embedding gets the gradient of both of its uses. That of a mixture may have another size
    than the context vectors, which sets that of the z."""
    size = D + 2 * kind.startswith(MIXED)
    embedding = torch.nn.Embedding(V, size).double()
    head = build(kind, embedding=embedding).double()
    assert head.weight is embedding.weight
    assert not kind.startswith(MIXED) or head.latent_features == D + 2
    check_formula(randomise(head), formula_of(kind), atol=KINDS[kind][1])
    head, target = head.double(), draw_targets(6)
    hidden = embedding(target)[:, :D]
    loss = F.nll_loss(formula_of(kind)(head, hidden), target)
    expected = torch.autograd.grad(loss, embedding.weight)
    got = torch.autograd.grad(head(embedding(target)[:, :D], target).loss.mean(), embedding.weight)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=KINDS[kind][1])


@every_kind
def test_bfloat16(kind: str) -> None:
    torch.manual_seed(0)
    check_bfloat16(randomise(build(kind, 32, 200, latent=32), scale=0.3), formula_of(kind))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "gates" not in kind])
def test_logits_of_ten_thousand(kind: str) -> None:
    """float32 against the formula in float64: no overflow, no gradient lost, with priors from 1 to
    exp(-100) and gates of 0 and of 1 among them. An error of 1e-6 in z is one of 0.1 in the
    log-probability."""
    mixed, own = kind.startswith(MIXED), kind.startswith("mixtape")
    head = randomise(build(kind, reduction="none"))
    with torch.no_grad():
        if mixed:
            head.weight.mul_(4e4 if own else 2e4)
            (head.gate_bias if own else head.prior.weight).mul_(200 if own else 20)
        else:
            head.weight.copy_(4000 * draw(V, D))
            head.bias.copy_(draw(V, seed=5))
    hidden, target = draw(20, D, seed=2).requires_grad_(), draw_targets(20)
    truth, wide = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = formula_of(kind)(truth, wide)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 0.2} if mixed else {"rtol": 2e-6, "atol": 1e-2}
    close["check_dtype"] = False
    torch.testing.assert_close(head.log_prob(hidden), expected, **close)
    loss = head(hidden, target).loss
    expected = -expected.gather(1, target[:, None])[:, 0]
    assert mixed or logits(head, hidden).abs().max() > 1e4
    assert not mixed or expected.max() > 1e3
    torch.testing.assert_close(loss, expected, **close)
    loss.sum().backward()
    expected.sum().backward()
    for p, q in zip([hidden, *head.parameters()], [wide, *truth.parameters()], strict=True):
        if p.requires_grad and q.grad.any():
            error, norm = (p.grad - q.grad).norm(), q.grad.norm()
            assert error <= (0.01 if mixed else 1e-3) * norm


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MORE_CLASSES])
def test_one_class(kind: str) -> None:
    head = build(kind, D, 1)
    output = head(draw(3, D), torch.zeros(3, dtype=torch.int64)).output
    torch.testing.assert_close(output, torch.zeros(3), rtol=0, atol=1e-6)
    torch.testing.assert_close(head.log_prob(draw(3, D)), torch.zeros(3, 1), rtol=0, atol=1e-6)


DEFAULT: dict[str, Callable[..., Any]] = {
    **{kind.name: kind for kind in (Softmax, SigSoftmax, GSS, PLIF, MonotonicNetwork)},
    "mos": MixtureOfSoftmaxes,
    **{
        f"mos, {name}": partial(MixtureOfSoftmaxes, function=name)
        for name in ("plif", "gss", "monotonic")
    },
    "moc": MixtureOfContexts,
    **{f"mixtape, {n}": partial(of_mixtape, own_gates=n) for n in (0, 15, V)},
}


@pytest.mark.parametrize("kind", DEFAULT)
def test_initial_values(kind: str) -> None:
    """Uniform weights, linear layers of torch for latent vectors and priors, and the unigram
    distribution where the weight is 0."""
    counts = 10.0 ** np.linspace(0, 6, V)
    counts[3] = 0
    torch.manual_seed(0)
    head = DEFAULT[kind](D, V, frequencies=counts)
    assert head.weight.abs().max() <= 0.1
    assert 0.05 < head.weight.std() < 0.065  # uniform in [-0.1, 0.1]: 0.058
    own = DEFAULT[kind](D, V, bias=False)
    assert own.bias is None
    assert not DEFAULT[kind](D, V).bias.any()
    if kind.startswith("mixtape"):
        assert not any(b.any() for b in (head.latent.bias, head.gate_hidden.bias, head.gate_bias))
        assert (head.gate_weight.abs() <= 0.1).all()
    elif kind.startswith(MIXED):
        bound = D**-0.5
        for values in (head.latent.weight, head.latent.bias, head.prior.weight):
            assert 0.9 * bound < values.abs().max() <= bound
        assert abs(head.latent.bias.mean()) < 0.2 * bound
        assert head.prior.bias is None
        assert head.n_components == 15
        assert head.latent.out_features == 15 * D
    else:
        wide = DEFAULT[kind](1024, V).weight
        assert 0.049 < wide.abs().max() <= 0.05  # 1.6 / 32
    check_unigram(head, counts)


STATE: dict[str, tuple[Any, str]] = {
    "softmax": (Softmax, "weight bias"),
    "no bias": (partial(Softmax, bias=False), "weight"),
    "sigsoftmax": (SigSoftmax, "weight bias"),
    "gss": (GSS, "weight bias"),
    "plif": (PLIF, "weight bias function.v"),
    "monotonic": (MonotonicNetwork, "weight bias function.u function.v function.b"),
    "mos": (MixtureOfSoftmaxes, "weight bias latent.weight latent.bias prior.weight"),
    "moc": (MixtureOfContexts, "weight bias latent.weight latent.bias prior.weight"),
    "mos, plif": (
        partial(MixtureOfSoftmaxes, function="plif"),
        "weight bias function.v latent.weight latent.bias prior.weight",
    ),
    "mixtape": (
        Mixtape,
        "weight bias gate_weight gate_bias latent.weight latent.bias gate_hidden.weight "
        "gate_hidden.bias gate_context.weight _extra_state",
    ),
}


@pytest.mark.parametrize("kind", STATE)
def test_state_dict_names(kind: str) -> None:
    """Saved files depend on them."""
    make, names = STATE[kind]
    state = make(D, V).state_dict()
    assert sorted(state) == sorted(names.split())
    assert kind != "mixtape" or list(saved_tables(state)) == ["own"]


def same(head: Head, other: Head) -> None:
    """Equal values, and equal gradients of what both have."""
    hidden, target = draw(20, D, dtype=torch.float64).requires_grad_(), draw_targets(20)
    got = []
    for some in (head.double(), other.double()):
        some.zero_grad()
        hidden.grad = None
        log_prob = some.log_prob(hidden)
        some(hidden, target).loss.backward()
        gradients = {name: p.grad for name, p in some.named_parameters()}
        got.append(gradients | {"log_prob": log_prob, "hidden": hidden.grad})
    for name in got[0].keys() & got[1].keys():
        torch.testing.assert_close(got[0][name], got[1][name], rtol=1e-9, atol=1e-12)


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
    z = latents(heads[0], hidden, 3)[:, 0]
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


def test_no_counts_at_all_are_all_equal() -> None:
    head = Softmax(D, V, frequencies=np.zeros(V))
    np.testing.assert_allclose(head.bias.detach().numpy(), -np.log(V), rtol=1e-6)


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


MIXTURES = {kind: KINDS[kind][0] for kind in ("mos", "moc", "mos-plif")}


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


def gate_row(head: Any) -> Tensor:
    """Row of the priors for each class: its own, or the last one."""
    row = torch.full((head.n_classes,), head.own_gates)
    row[head.own] = torch.arange(head.own_gates)
    return row


def gated(own_gates: int | None = 15, **options: Any) -> Mixtape:
    return of_mixtape(D, V, own_gates=own_gates, **{"latent_features": 7} | options)


@pytest.mark.parametrize("own_gates", [0, 15, V])
def test_priors(own_gates: int) -> None:
    """One row for each class with gates of its own, in the order of ``own``, one for the rest."""
    head = randomise(gated(own_gates), scale=3.0)
    hidden = draw(6, 4, D)
    pi = head.priors(hidden)
    assert pi.shape == (6, 4, own_gates + 1, 4)
    assert (pi >= 0).all()
    assert (pi <= 1).all()
    torch.testing.assert_close(pi.sum(-1), torch.ones(6, 4, own_gates + 1))
    expected = priors_of_mixtape(head, hidden.view(24, D)).view(6, 4, V, 4)
    torch.testing.assert_close(pi[:, :, gate_row(head)], expected)


def test_order_decides_who_has_gates() -> None:
    head = gated(5)
    assert torch.equal(head.own, ORDER[:5])
    head = gated(5, order=None)
    assert torch.equal(head.own, torch.arange(5))
    assert gated(None).own_gates == 4  # a tenth of 37, rounded up
    assert Mixtape(D, 10).own_gates == 1
    with torch.no_grad():
        randomise(head)
        before = head.log_prob(draw(1, D))[0]
        head.gate_bias[2].add_(5.0)
        difference = head.log_prob(draw(1, D))[0] - before
    # Through the normalizer all change by the same; class 2 by itself.
    others = difference[torch.arange(V) != 2]
    torch.testing.assert_close(others, others[:1].expand(V - 1))
    assert abs(difference[2] - others[0]) > 0.05


def test_zero_gates_are_shared_gates() -> None:
    """Value and gradients of a head whose classes all have gates of their own, with v = c = 0."""
    shared = randomise(gated(0)).double()
    own = gated(V).double()
    state = shared.state_dict()
    state = state | {
        EXTRA_STATE: own.get_extra_state(),
        "gate_weight": torch.zeros(V, 4),
        "gate_bias": torch.zeros(V, 3),
    }
    own.load_state_dict(state)
    hidden, target = draw(20, D, dtype=torch.float64).requires_grad_(), draw_targets(20)
    got = []
    for head in (shared, own):
        hidden.grad = None
        head(hidden, target).loss.backward()
        grads = {name: p.grad for name, p in head.named_parameters()}
        for name in ("gate_weight", "gate_bias"):
            assert grads.pop(name).any() == (head is own)
        got.append([head.log_prob(hidden), hidden.grad, *grads.values()])
    for a, b in zip(*got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_shared_gates_are_a_mixture_of_contexts() -> None:
    """At one context vector, whose priors a MixtureOfContexts can have too."""
    head = randomise(gated(0)).double()
    hidden = draw(1, D, dtype=torch.float64)
    other = MixtureOfContexts(D, V, components=4, latent_features=7).double()
    prior = head.priors(hidden)[0, 0].log()
    with torch.no_grad():
        other.weight.copy_(head.weight)
        other.bias.copy_(head.bias)
        other.latent.load_state_dict(head.latent.state_dict())
        other.prior.weight.copy_(prior[:, None] * hidden / hidden.square().sum())
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))


def test_frequent_classes_have_their_own_gates() -> None:
    counts = (np.arange(V) * 7 % 11).astype(np.int64)
    head = Mixtape(D, V, frequencies=counts, own_gates=9)
    chosen = counts[head.own.numpy()]
    assert (np.diff(chosen) <= 0).all()
    rest = np.delete(counts, head.own.numpy())
    assert chosen.min() >= rest.max()


def test_saved_with_its_order(tmp_path: Any) -> None:
    head = randomise(gated())
    head.save(tmp_path / "head")
    other: Any = load_head(tmp_path / "head")
    assert torch.equal(other.own, head.own)
    assert torch.equal(copy.deepcopy(head).own, head.own)
    empty: Head = randomise(gated(0))
    empty.save(tmp_path / "head")
    hidden = draw(4, D)
    assert torch.equal(load_head(tmp_path / "head").log_prob(hidden), empty.log_prob(hidden))


@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        *(("softmax", reduction) for reduction in ("mean", "none")),
        ("gss", "none"),
        ("plif", "mean"),
        ("monotonic", "none"),
        ("mos", "mean"),
        pytest.param("mos", "none", marks=pytest.mark.slow),
        pytest.param("mos-plif", "mean", marks=pytest.mark.slow),
        ("moc", "none"),
        *(("mixtape", reduction) for reduction in ("mean", "none")),
    ],
)
def test_a_step_holds_no_tensor_of_all_logits(
    kind: str, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even those of one component: N V, of N V K."""
    rows, classes = 400 if kind == "mixtape" else 2000, 1500
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**18)
    own: dict[str, dict[str, Any]] = {
        "plif": {"intervals": 1000},
        "monotonic": {"units": 9, "intervals": 512},
        "mos": {"components": 8, "latent_features": 8},
        "mos-plif": {"components": 8, "latent_features": 8, "function_options": PIECES},
        "moc": {"components": 8, "latent_features": 8},
        "mixtape": {"own_gates": 150, "gate_features": 4, "latent_features": 7},
    }
    head: Any = build_head(kind, 16, classes, reduction=reduction, **own.get(kind, {}))
    hidden = draw(rows, 16).requires_grad_()
    target = draw_targets(rows, n_classes=classes)
    largest, most = allocations(lambda: head(hidden, target).loss.sum().backward())
    assert largest < rows * classes * 4 / 7  # 250 rows, and what rounds them up
    assert most < rows * classes * 4 / 2
    if kind == "softmax":  # what the measurement says where all logits are held
        _, eager = allocations(lambda: F.cross_entropy(logits(head, hidden), target).backward())
        assert eager > rows * classes * 4


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (GSS, {"k": 0.0}, "k: expected a finite positive number, got 0.0"),
    (GSS, {"c": math.nan}, "c: expected a finite number, got nan"),
    (GSS, {"k": "2"}, "k: expected a finite positive number, got '2'"),
    (PLIF, {"intervals": 12.5}, "intervals: expected a whole number from 1 to 16777216"),
    (PLIF, {"radius": 0.0}, "radius: expected a finite positive number, got 0.0"),
    (PLIF, {"radius": 1e308}, "radius: expected a number from 1e-6 to 1e6, got 1e\\+308"),
    (MonotonicNetwork, {"units": 0}, "units: expected a whole number from 1 to 16777216"),
    (MonotonicNetwork, {"intervals": 0}, "intervals: expected a whole number from 1 to 16777216"),
    (
        Softmax,
        {"embedding": torch.nn.Embedding(V, D + 1)},
        r"embedding: expected a weight of shape \(37, 10\) to tie to, got \(37, 11\)",
    ),
    (Softmax, {"embedding": torch.ones(V, D)}, "embedding: .* to tie to, got Tensor"),
    (Softmax, {"bias": None}, "bias: expected True or False, got None"),
    (Softmax, {"n_classes": 2**63}, "n_classes: expected a whole number from 1 to"),
    (MixtureOfSoftmaxes, {"components": 0}, "components: expected a whole number of at least 1"),
    (MixtureOfSoftmaxes, {"latent_dropout": 1.0}, r"latent_dropout: .* in \[0, 1\), got 1.0"),
    (MixtureOfSoftmaxes, {"function": "relu"}, "function: expected one of softmax, .*'relu'"),
    (
        MixtureOfSoftmaxes,
        {"function": "plif", "function_options": {"c": 1.0}},
        "function_options: .*unexpected keyword argument 'c'",
    ),
    (Mixtape, {"own_gates": -1}, "own_gates: expected a whole number of at least 0, got -1"),
    (Mixtape, {"own_gates": V + 1}, r"own_gates: expected 0 to 37 \(n_classes\), got 38"),
    (Mixtape, {"gate_features": 0}, "gate_features: expected a whole number of at least 1, got 0"),
    (Mixtape, {"order": torch.arange(V - 1)}, r"order: expected a permutation of 0\.\.36"),
    (Mixtape, {"order": torch.arange(V).int()}, r"order: .* int64 \[37\]"),
    *(
        (kind, options, match)
        for kind in (Softmax, MixtureOfSoftmaxes, Mixtape)
        for options, match in (
            ({"in_features": 0}, "in_features: expected a whole number of at least 1, got 0"),
            ({"n_classes": 0}, "n_classes: expected a whole number "),
        )
    ),
    *(
        (kind, options, match)
        for kind in (MixtureOfSoftmaxes, Mixtape)
        for options, match in (
            ({"latent_features": 0}, "latent_features: expected a whole number of at least 1"),
            (
                {"embedding": torch.nn.Embedding(V, D), "latent_features": 7},
                r"embedding: expected a weight of shape \(37, 7\) to tie to, got \(37, 10\)",
            ),
        )
    ),
]


@pytest.mark.parametrize(
    ("make", "options", "match"), BAD, ids=lambda x: str(getattr(x, "__name__", x))[:40]
)
def test_bad_options(make: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(**({"in_features": D, "n_classes": V} | options))
