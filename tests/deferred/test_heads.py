"""Heads behind deferred logits: estimates of the loss, heads of their own, screens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hstree
from hstree import deferred
from hstree.deferred import DeferredHead, DeferredLogits, defer_logits, undefer

V, D, N = 300, 12, 40
COUNTS = 1000 / torch.arange(1, V + 1)
HIDDEN = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
TARGET = torch.randint(V, (N,), generator=torch.Generator().manual_seed(2))
TARGET[::7] = -100


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "LEAST", 0)


def sampled(**options: Any) -> hstree.SampledSoftmax:
    given = {"negatives": 30, "frequencies": COUNTS} | options
    return hstree.SampledSoftmax(D, V, **given)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(D, V)
    nn.init.normal_(layer.weight)
    return layer


def test_the_loss_in_training_is_the_sampled_one_with_the_layers_weight() -> None:
    layer, other = linear(), linear()
    head = hstree.SampledSoftmax.from_linear(other, negatives=30, frequencies=COUNTS)
    defer_logits(layer, sampled())
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    torch.manual_seed(3)
    logits = layer(HIDDEN)
    loss = F.cross_entropy(logits, TARGET)
    torch.manual_seed(3)
    expected = head(HIDDEN, TARGET).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(layer.weight.grad, head.weight.grad)
    torch.testing.assert_close(layer.bias.grad, head.bias.grad)
    # Numbers that are read are the layer's, and reading them changes no loss.
    assert torch.equal(logits + 0, F.linear(HIDDEN, layer.weight, layer.bias))
    torch.manual_seed(3)
    torch.testing.assert_close(F.cross_entropy(logits, TARGET), expected)
    torch.testing.assert_close(logits.logsumexp(-1), (logits + 0).logsumexp(-1))
    # In evaluation mode the loss is exact.
    exact = F.cross_entropy(logits + 0, TARGET)
    torch.testing.assert_close(F.cross_entropy(layer.eval()(HIDDEN), TARGET), exact)
    assert abs(loss - exact) > 1e-3


def test_a_factor_is_in_the_sampled_loss_and_a_cap_is_refused() -> None:
    layer = linear()
    scaled = copy.deepcopy(layer)
    with torch.no_grad():
        scaled.weight *= 0.25
        scaled.bias *= 0.25
    for each in (layer, scaled):
        defer_logits(each, sampled())
    torch.manual_seed(3)
    loss = F.cross_entropy(layer(HIDDEN) / 4, TARGET)
    torch.manual_seed(3)
    torch.testing.assert_close(loss, F.cross_entropy(scaled(HIDDEN), TARGET))
    with pytest.raises(TypeError, match="head: expected logits without a soft cap"):
        F.cross_entropy(5 * (layer(HIDDEN) / 5).tanh(), TARGET)


def test_an_edit_is_in_the_loss() -> None:
    """Logits that a model has masked are no longer those of the estimate."""
    layer = defer_logits(linear(), sampled())
    logits = layer(HIDDEN)
    logits[:, 5] = -torch.inf
    expected = F.linear(HIDDEN, layer.weight, layer.bias)
    expected[:, 5] = -torch.inf
    kept = TARGET.masked_fill(TARGET == 5, -100)
    torch.testing.assert_close(F.cross_entropy(logits, kept), F.cross_entropy(expected, kept))


def test_samples_can_be_switched_off_during_training() -> None:
    head, layer = sampled(), linear()
    defer_logits(layer, head)
    head.samples_in_training = False
    expected = F.cross_entropy(F.linear(HIDDEN, layer.weight, layer.bias), TARGET)
    torch.testing.assert_close(F.cross_entropy(layer(HIDDEN), TARGET), expected)


def test_row_sparse_gradients() -> None:
    layer = linear()
    defer_logits(layer, sampled(sparse=True))
    F.cross_entropy(layer(HIDDEN), TARGET).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_sparse


def test_z_loss_in_training_only() -> None:
    layer = linear()
    defer_logits(layer, hstree.Softmax(D, V, z_loss=0.01))
    z = F.linear(HIDDEN, layer.weight, layer.bias)
    exact = F.cross_entropy(z, TARGET)
    square = z.logsumexp(-1).square()[TARGET != -100].mean()
    torch.testing.assert_close(F.cross_entropy(layer(HIDDEN), TARGET), exact + 0.01 * square)
    torch.testing.assert_close(F.cross_entropy(layer.eval()(HIDDEN), TARGET), exact)


def test_the_heads_own_parameters_are_let_go() -> None:
    layer, head = linear(), sampled()
    defer_logits(layer, head)
    assert head.weight is layer.weight
    copied = copy.deepcopy(layer)
    assert copied.deferral.head.weight is copied.weight
    assert undefer(layer) is layer


HEADS: dict[str, Callable[[], hstree.Head]] = {
    "trees": lambda: hstree.TreeEnsemble.from_counts(D, COUNTS, n_trees=2),
    "sparse trees": lambda: hstree.TreeEnsemble.from_counts(D, COUNTS, sparse=True),
    "forest": lambda: hstree.ForestSoftmax(D, V, clusters=8),
    "sampled forest": lambda: hstree.ForestSoftmax(
        D, V, clusters=8, negatives=20, frequencies=COUNTS
    ),
    "plif": lambda: hstree.PLIF(D, V, intervals=50),
    "mos": lambda: hstree.MixtureOfSoftmaxes(D, V, components=3),
    "mixtape": lambda: hstree.Mixtape(D, V),
    "adaptive": lambda: hstree.AdaptiveSoftmax(D, V),
    "gss": lambda: hstree.GSS(D, V),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_with_parameters_of_their_own(name: str) -> None:
    torch.manual_seed(0)
    head = HEADS[name]()
    reference = copy.deepcopy(head)
    layer = defer_logits(linear(), head)
    assert isinstance(layer, DeferredHead)
    assert undefer(layer) is head
    hidden, other = (HIDDEN.clone().requires_grad_() for _ in range(2))
    torch.manual_seed(4)
    logits = layer(hidden.view(4, 10, D))
    assert isinstance(logits, DeferredLogits)
    loss = F.cross_entropy(logits.view(-1, V).float(), TARGET)
    loss.backward()
    torch.manual_seed(4)
    expected = reference(other, TARGET).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, other.grad)
    for own, wanted in zip(head.parameters(), reference.parameters(), strict=True):
        if wanted.grad is None:
            assert own.grad is None
        else:
            torch.testing.assert_close(own.grad.to_dense(), wanted.grad.to_dense())
    assert not logits.computed
    log_prob = reference.log_prob(other).detach()
    scores = reference.scores(other).detach() if reference.has_normalizer else log_prob
    torch.testing.assert_close(logits.view(-1, V).detach() + 0, scores)
    normalizer = layer(hidden).logsumexp(-1)
    torch.testing.assert_close(normalizer, scores.logsumexp(-1), rtol=1e-4, atol=1e-5)
    at = TARGET.clamp_min(0)[:, None]
    for selected, of_all in (
        (layer(hidden).log_softmax(-1).gather(-1, at), log_prob),
        (layer(hidden).gather(-1, at), scores),
    ):
        torch.testing.assert_close(selected, of_all.gather(-1, at), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        plain = layer.eval()(HIDDEN.view(N, 1, D))
    assert type(plain) is Tensor
    torch.testing.assert_close(plain.view(N, V), scores)
    # A factor makes another distribution, which the head does not know.
    half = F.cross_entropy(layer(hidden) / 2, TARGET)
    torch.testing.assert_close(half, F.cross_entropy(log_prob / 2, TARGET), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["trees", "plif", "mos"])
def test_parameters_of_the_call_and_writes(name: str) -> None:
    layer: Any = defer_logits(linear(), HEADS[name]())
    others = {key: 0.5 * p.detach() for key, p in layer.named_parameters()}
    logits = torch.func.functional_call(layer, others, (HIDDEN,))
    with torch.no_grad():
        for key, p in layer.named_parameters():
            p.copy_(others[key])
    torch.testing.assert_close(F.cross_entropy(logits, TARGET), layer.head(HIDDEN, TARGET).loss)
    logits = layer(HIDDEN)
    logits[:, 3] = -torch.inf  # a model that masks a token
    logits.logsumexp(-1).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    logits = layer(HIDDEN)
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="expected to be read before"):
        logits.max()


def test_a_head_has_no_matrix_but_a_dtype() -> None:
    layer: Any = defer_logits(linear(), HEADS["trees"]())
    assert (layer.weight.dtype, layer.weight.device.type) == (torch.float32, "cpu")
    assert (layer.in_features, layer.out_features, layer.bias) == (D, V, None)
    with pytest.raises(AttributeError, match="expected an output layer that is one matrix"):
        F.linear(HIDDEN, layer.weight)
    with pytest.raises(AttributeError, match="expected an output layer that is one matrix"):
        layer.weight.data  # noqa: B018


def screened(layer: nn.Linear, **options: Any) -> nn.Module:
    contexts = torch.randn(400, D, generator=torch.Generator().manual_seed(5))
    head = hstree.ScreenedSoftmax.from_linear(layer, contexts, **options).eval()
    return defer_logits(layer, head).eval()


def test_a_screen_gives_scores_on_the_layers_scale() -> None:
    layer = linear()
    plain = copy.deepcopy(layer)
    screened(layer, exact=60)
    one = HIDDEN.view(N, 1, D)
    with torch.no_grad():
        scores, expected = layer(one), plain(one)
        assert type(scores) is Tensor
        found = scores.argmax(-1) == expected.argmax(-1)
        best = expected.max(-1).values
        torch.testing.assert_close(scores.max(-1).values[found], best[found])
        assert found.float().mean() > 0.9
        # Previews of the others, not log-probabilities.
        assert (scores - expected).abs().max() < 3
        assert torch.equal(layer(HIDDEN) + 0, plain(HIDDEN))  # a text: exact
    loss = F.cross_entropy(layer.train()(HIDDEN), TARGET)
    torch.testing.assert_close(loss, F.cross_entropy(plain(HIDDEN), TARGET))


@pytest.mark.parametrize("exact", [40, V])
@pytest.mark.parametrize("scale", [1e-38, 1e-37, 1e-30, 1e-10, 1.0, 1e10, 1e30])
def test_hidden_vectors_of_any_scale(scale: float, exact: int) -> None:
    layer = linear()
    with torch.no_grad():
        layer.bias.zero_()
        plain = copy.deepcopy(layer)
        screened(layer, exact=exact)
        one = (HIDDEN * scale).view(N, 1, D)
        scores, expected = layer(one), plain(one)
        assert not scores.isnan().any()
        if scale > 1e-37 and exact == V:
            assert torch.equal(scores.argmax(-1), expected.argmax(-1))
