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
    DOC,
    Head,
    MixtureOfContexts,
    MixtureOfSoftmaxes,
    Softmax,
    build_head,
    load_head,
)
from hstree.ops.mixture_log_prob import CHUNK_BYTES

SIZES, EXPERTS = (3, 2, 5), (1, 0, 2)


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
        + f(head, logits(head, component(head, head.latent[0], k, hidden))).log_softmax(1)
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
        prior[:, k, None] * component(head, head.latent[0], k, hidden)
        for k in range(len(head.prior.weight))
    )
    return logits(head, context).log_softmax(1)


def doc(head: Any, hidden: Tensor) -> Tensor:
    """Layers of SIZES, EXPERTS of them: one reads the first layer, none the second."""
    first, last = hidden[:, :3], hidden[:, 5:]
    log_prior = (last @ head.prior.weight.t()).log_softmax(1)
    contexts = [
        component(head, head.latent[0], 0, first),
        component(head, head.latent[1], 0, last),
        component(head, head.latent[1], 1, last),
    ]
    parts = [log_prior[:, j, None] + logits(head, z).log_softmax(1) for j, z in enumerate(contexts)]
    return torch.stack(parts).logsumexp(0)


def _doc(in_features: int, n_classes: int, **options: Any) -> Head:
    return DOC(in_features, n_classes, layer_sizes=SIZES, experts=EXPERTS, **options)


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
    "doc": (_doc, doc),
}
every_formula = pytest.mark.parametrize("kind", FORMULAS)


@every_formula
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_formula(kind: str, bias: bool) -> None:
    build, formula = FORMULAS[kind]
    check_formula(randomise(build(D, V, bias=bias, latent_features=7)), formula)


@every_formula
def test_formula_in_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time: sums over chunks."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * 3 * 8)
    build, formula = FORMULAS[kind]
    check_formula(randomise(build(D, V, latent_features=7)), formula)


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
    size = 10 if kind == "doc" else 32
    torch.manual_seed(0)
    check_bfloat16(randomise(build(size, 200, latent_features=32), scale=0.3), formula)


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
        names = ["weight", "bias", "prior.weight", "latent.0.weight", "latent.0.bias"]
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
            for part in (head.latent[0].weight, head.latent[0].bias):
                part.copy_(part[:4].repeat(3, *[1] * (part.dim() - 1)))
    same(*heads)
    plain = Softmax(4, V)
    plain.load_state_dict({name: getattr(heads[0], name) for name in ("weight", "bias")})
    hidden = draw(9, D, dtype=torch.float64)
    z = component(heads[0], heads[0].latent[0], 0, hidden)
    torch.testing.assert_close(heads[0].log_prob(hidden), plain.double().log_prob(z))


def test_doc_of_the_last_layer_is_mos() -> None:
    head = randomise(DOC(D, V, layer_sizes=SIZES, experts=(0, 0, 3), latent_features=6))
    other = MixtureOfSoftmaxes(5, V, components=3, latent_features=6)
    other.load_state_dict(head.state_dict())
    same(head, other, size=5)
    hidden = draw(9, D, dtype=torch.float64).requires_grad_()
    head(hidden, draw_targets(9)).loss.backward()
    assert not hidden.grad[:, :5].any()


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


MIXTURES = {kind: FORMULAS[kind][0] for kind in ("mos", "moc", "doc", "mos-plif")}


def published_penalty(prior: Tensor) -> Tensor:
    """Of nttcslab-nlp/doc_lm: priors [time, streams, J]."""
    sums = prior.sum(0)
    return sums.var() * (sums.shape[1] - 1) / sums.mean() ** 2


def test_prior_penalty_as_published() -> None:
    """Value and gradients: the loss without it, plus the penalty."""
    head: Any = randomise(_doc(D, V, prior_penalty=0.7)).double()
    plain: Any = _doc(D, V).double()
    plain.load_state_dict(head.state_dict())
    hidden, target = draw(6, 4, D, dtype=torch.float64).requires_grad_(), draw_targets(6, 4)
    prior = (hidden[..., 5:] @ plain.prior.weight.t()).softmax(-1)
    expected = plain(hidden, target).loss + 0.7 * published_penalty(prior)
    output, loss = head(hidden, target)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(output, plain(hidden, target).output)
    got = torch.autograd.grad(loss, [hidden, *head.parameters()])
    wanted = torch.autograd.grad(expected, [hidden, *plain.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    head.eval()
    assert torch.equal(head(hidden, target).loss, plain(hidden, target).loss)
    assert torch.equal(head.log_prob(hidden), plain.log_prob(hidden))


def test_prior_penalty_leaves_ignored_rows_out() -> None:
    """Of every reduction, which adds it to each row that counts; class weights do not weigh it."""
    weight = torch.linspace(0.5, 2, V)
    head: Any = randomise(_doc(D, V, prior_penalty=0.3, class_weight=weight))
    plain: Any = _doc(D, V, class_weight=weight)
    plain.load_state_dict(head.state_dict())
    hidden, target = draw(8, 3, D), draw_targets(8, 3)
    target[5:], target[0, 1] = -100, -100
    prior = (hidden[..., 5:] @ plain.prior.weight.t()).softmax(-1)
    penalty = 0.3 * published_penalty(prior * (target != -100)[..., None])
    for reduction, share in (("mean", 1), ("sum", 14), ("none", target != -100)):
        head.reduction = plain.reduction = reduction
        got, without = (some(hidden, target).loss for some in (head, plain))
        torch.testing.assert_close(got - without, penalty * share, rtol=1e-5, atol=1e-5)
    target.fill_(-100)
    hidden.requires_grad_()
    for reduction, shape in (("sum", (8, 3)), ("none", (8, 3)), ("sum", (0, 3)), ("sum", (8, 0))):
        head.reduction = reduction
        head.zero_grad()
        loss = head(hidden[: shape[0], : shape[1]], target[: shape[0], : shape[1]]).loss
        assert not loss.any()
        loss.sum().backward()
        assert not head.prior.weight.grad.any()


def test_prior_penalty_of_equal_priors() -> None:
    """None; and of one component, or of rows without time."""
    hidden, target = draw(6, D), draw_targets(6)
    for experts in (EXPERTS, (0, 0, 1)):
        head: Any = DOC(D, V, layer_sizes=SIZES, experts=experts, prior_penalty=5.0)
        with torch.no_grad():
            head.prior.weight.zero_()
        torch.testing.assert_close(head(hidden, target).loss, head.eval()(hidden, target).loss)
    head = randomise(_doc(D, V, prior_penalty=1.0))
    prior = (hidden[:, 5:] @ head.prior.weight.t()).softmax(-1)
    penalty = published_penalty(prior[:, None])
    share = prior.mean(0)
    torch.testing.assert_close(penalty, 3 * (3 * (share - 1 / 3) ** 2).sum())
    for x, y in ((hidden, target), (hidden[0], target[0])):
        got = head.train()(x, y).loss - head.eval()(x, y).loss
        one = published_penalty(prior[: max(1, y.numel() * y.dim()), None])
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


def test_prior_penalty_is_saved(tmp_path: Path) -> None:
    _doc(D, V, prior_penalty=0.001).save(tmp_path / "head")
    assert load_head(tmp_path / "head").config()["prior_penalty"] == 0.001
    assert _doc(D, V).config()["prior_penalty"] == 0


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
    size = head.latent_features
    if kind == "doc":  # the same elements of all components
        torch.testing.assert_close(kept.view(600, -1, size), kept[:, None, :size].expand(-1, 3, -1))
        kept = kept[:, :size]
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
        (DOC, {"layer_sizes": SIZES}),
        (MixtureOfSoftmaxes, {"function": "gss"}),
        (MixtureOfSoftmaxes, {"function": "monotonic"}),
    ],
    ids=str,
)
def test_initial_values(build: Any, options: dict[str, Any]) -> None:
    """Linear layers of torch for the latent vectors and priors; with zero biases for DOC. The
    unigram distribution where the weight is 0."""
    counts = 10.0 ** np.linspace(0, 6, V)
    counts[3] = 0
    torch.manual_seed(0)
    head = build(D, V, frequencies=counts, **options)
    assert head.weight.abs().max() <= 0.1
    for linear in (*head.latent, head.prior):
        bound = linear.in_features**-0.5
        assert 0.9 * bound < linear.weight.abs().max() <= bound
    for linear in head.latent:
        if build is DOC:
            assert not linear.bias.any()
        else:
            bound = linear.in_features**-0.5
            assert 0.9 * bound < linear.bias.abs().max() <= bound
            assert abs(linear.bias.mean()) < 0.2 * bound
    assert head.prior.bias is None
    assert head.n_components == (20 if build is DOC else 15)
    assert [linear.out_features for linear in head.latent] == (
        [5 * 5, 15 * 5] if build is DOC else [15 * D]
    )
    check_unigram(head, counts)
    if build is DOC:  # also where the context is 0
        log_prob = build(D, V, frequencies=counts, **options).log_prob(torch.zeros(D)).detach()
        counts[3] = 0.5
        np.testing.assert_allclose(log_prob.exp().numpy(), counts / counts.sum(), rtol=1e-5)


def test_doc_layers() -> None:
    assert DOC.reads_layers
    assert not MixtureOfSoftmaxes.reads_layers
    assert [x.in_features for x in DOC(D, V, layer_sizes=[D]).latent] == [D]
    assert DOC(D, V, layer_sizes=[D]).n_components == 15
    head = DOC(D, V, layer_sizes=SIZES, experts=(2, 1, 0))
    assert [x.in_features for x in head.latent] == [3, 2]
    assert head.prior.in_features == 5  # the last layer gives the priors, read or not
    assert head.latent_features == 5


def test_state_dict_names() -> None:
    """Saved files depend on them."""
    names = ["weight", "bias", "latent.0.weight", "latent.0.bias", "prior.weight"]
    for build in (MixtureOfSoftmaxes, MixtureOfContexts):
        assert list(build(D, V).state_dict()) == names
    with_function = [*names[:2], "function.v", *names[2:]]
    options: Any = {"function": "plif", "function_options": PIECES}
    assert list(MixtureOfSoftmaxes(D, V, **options).state_dict()) == with_function
    with_two = [*names[:4], "latent.1.weight", "latent.1.bias", "prior.weight"]
    assert list(_doc(D, V).state_dict()) == with_two


@pytest.mark.parametrize(
    ("build", "options", "match"),
    [
        (
            MixtureOfSoftmaxes,
            {"components": 0},
            "components: expected a whole number of at least 1, got 0",
        ),
        (
            MixtureOfContexts,
            {"components": -2},
            "components: expected a whole number of at least 1, got -2",
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
        (
            MixtureOfContexts,
            {"latent_dropout": -0.1},
            r"latent_dropout: expected a probability in \[0, 1\), got -0.1",
        ),
        (
            MixtureOfSoftmaxes,
            {"latent_dropout": math.nan},
            r"latent_dropout: expected a probability in \[0, 1\), got nan",
        ),
        (MixtureOfSoftmaxes, {"components": 2.5}, "components: expected a whole .*, got 2.5"),
        (MixtureOfSoftmaxes, {"components": True}, "components: expected a whole .*, got True"),
        (MixtureOfSoftmaxes, {"components": "3"}, "components: expected a whole .*, got '3'"),
        (
            MixtureOfSoftmaxes,
            {"latent_dropout": "0.5"},
            r"latent_dropout: expected a probability in \[0, 1\), got '0.5'",
        ),
        (DOC, {"layer_sizes": (4.0, 6.0)}, "layer_sizes: expected a whole number .*, got 4.0"),
        (MixtureOfSoftmaxes, {"function": "relu"}, "function: expected one of softmax, .*'relu'"),
        (
            MixtureOfSoftmaxes,
            {"function": "plif", "function_options": {"c": 1.0}},
            "function_options: .*unexpected keyword argument 'c'",
        ),
        (
            MixtureOfSoftmaxes,
            {"function": "plif", "function_options": {"radius": 0}},
            "radius: expected a finite positive number, got 0",
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
        (
            MixtureOfContexts,
            {"n_classes": 0},
            "n_classes: expected a whole number of at least 1, got 0",
        ),
        (
            DOC,
            {"layer_sizes": (3, 6)},
            r"layer_sizes: expected sizes with the sum 10 \(in_features\), got \[3, 6\]",
        ),
        (DOC, {"layer_sizes": ()}, r"layer_sizes: expected sizes with the sum 10 .*, got \[\]"),
        (
            DOC,
            {"layer_sizes": (-1, 11)},
            "layer_sizes: expected a whole number of at least 1, got -1",
        ),
        (
            DOC,
            {"layer_sizes": 10, "experts": (1, 2)},
            "layer_sizes: expected a sequence of numbers, got 10",
        ),
        (
            DOC,
            {"layer_sizes": (4, 6), "experts": (1, 2, 3)},
            r"experts: expected 2 numbers of components, .*, got \(1, 2, 3\)",
        ),
        (
            DOC,
            {"layer_sizes": (4, 6), "experts": (0, 0)},
            r"experts: expected at least one component, got \[0, 0\]",
        ),
        (
            DOC,
            {"layer_sizes": (4, 6), "prior_penalty": -0.001},
            "prior_penalty: expected a number of at least 0, got -0.001",
        ),
        (
            DOC,
            {"layer_sizes": (4, 6), "prior_penalty": "x"},
            "prior_penalty: expected a finite number, got 'x'",
        ),
        (
            DOC,
            {"layer_sizes": (4, 6), "experts": (3, -1)},
            "experts: expected a whole number of at least 0, got -1",
        ),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_options(build: Any, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build(**({"in_features": D, "n_classes": V} | options))


def test_numbers_of_numpy_are_saved(tmp_path: Path) -> None:
    sizes = list(np.array([4, 6]))
    head = DOC(
        sum(sizes),
        np.int64(V),
        layer_sizes=sizes,
        experts=list(np.array([1, 2])),
        latent_features=np.int32(5),
        latent_dropout=np.float32(0.5),
        function="plif",
        function_options={"intervals": np.int64(7), "radius": np.float64(2)},
    )
    head.save(tmp_path / "head")
    other = load_head(tmp_path / "head")
    assert other.config() == head.config()
    assert other.config()["layer_sizes"] == [4, 6]


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
        ("doc", "mean"),
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
    if kind == "doc":
        head: Head = DOC(D, classes, layer_sizes=SIZES, experts=(2, 2, 4), **options)
    else:
        head = build_head(kind, D, classes, components=components, **options)
    hidden = draw(rows, D).requires_grad_()
    target = draw_targets(rows, n_classes=classes)
    largest, most = allocations(lambda: head(hidden, target).loss.sum().backward())
    assert largest < rows * classes * 4 / 7  # 250 rows, and what rounds them up
    assert most < rows * classes * 4 / 2
