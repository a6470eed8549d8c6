"""Mixtape: its formula class by class, gates of frequent and of other classes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads.support import (
    ORDER,
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
from hstree.heads import Head, Mixtape, MixtureOfContexts, load_head
from hstree.heads.state import EXTRA_STATE, saved_tables
from hstree.ops.mixture_log_prob import CHUNK_BYTES


def gate_row(head: Any) -> Tensor:
    """Row of the priors for each class: its own, or the last one."""
    row = torch.full((head.n_classes,), head.own_gates)
    row[head.own] = torch.arange(head.own_gates)
    return row


def priors(head: Any, hidden: Tensor) -> Tensor:
    """pi [N, V, 4]: g = sigmoid(v_x . tanh(Q_j h + q_j) + u_j . h + c_xj), or sigmoid(u_j . h) for
    classes without gates of their own."""
    size, g = head.gate_features, []
    for j in range(3):
        block = slice(j * size, (j + 1) * size)
        q = hidden @ head.gate_hidden.weight[block].t() + head.gate_hidden.bias[block]
        own = torch.tanh(q) @ head.gate_weight.t() + head.gate_bias[:, j]
        score = own @ torch.nn.functional.one_hot(head.own, head.n_classes).to(own.dtype)
        g.append(torch.sigmoid(score + (hidden @ head.gate_context.weight[j])[:, None]))
    g1, g2, g3 = g
    return torch.stack([g1 * g2, g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3)], -1)


def mixtape(head: Any, hidden: Tensor) -> Tensor:
    pi, size = priors(head, hidden), head.latent_features
    logits: Any = 0
    for k in range(4):
        block = slice(k * size, (k + 1) * size)
        z = torch.tanh(hidden @ head.latent.weight[block].t() + head.latent.bias[block])
        logits = logits + pi[..., k] * (z @ head.weight.t())
    return (logits if head.bias is None else logits + head.bias).log_softmax(1)


def build(own_gates: int | None = 15, size: int = D, classes: int = V, **options: Any) -> Mixtape:
    options = {"order": ORDER, "gate_features": 4, "latent_features": 7} | options
    return Mixtape(size, classes, own_gates=own_gates, **options)


@pytest.mark.parametrize("own_gates", [0, 1, 15, V])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_formula(own_gates: int, bias: bool) -> None:
    check_formula(randomise(build(own_gates, bias=bias)), mixtape)


def test_formula_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows at a time."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 3 * V * 8)
    check_formula(randomise(build()), mixtape)


def test_formula_tied() -> None:
    embedding = torch.nn.Embedding(V, D + 2)
    head = build(embedding=embedding, latent_features=None)
    assert head.weight is embedding.weight
    assert head.latent_features == D + 2
    check_formula(randomise(head), mixtape)


@pytest.mark.parametrize("own_gates", [0, 40, 200])
def test_bfloat16(own_gates: int) -> None:
    torch.manual_seed(0)
    head = build(own_gates, 32, 200, order=None, latent_features=32, gate_features=16)
    check_bfloat16(randomise(head, scale=0.3), mixtape)


def test_logits_of_ten_thousand() -> None:
    head = randomise(build(reduction="none"))
    with torch.no_grad():
        head.weight.mul_(4e4)
        head.gate_bias.mul_(200)  # gates of 0 and of 1
    hidden, target = draw(20, D, seed=2).requires_grad_(), draw_targets(20)
    truth, wide = copy.deepcopy(head).double(), hidden.detach().double().requires_grad_()
    expected = mixtape(truth, wide)
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 0.2, "check_dtype": False}
    torch.testing.assert_close(head.log_prob(hidden), expected, **close)
    loss = head(hidden, target).loss
    expected = -expected.gather(1, target[:, None])[:, 0]
    assert expected.max() > 1e4
    torch.testing.assert_close(loss, expected, **close)
    loss.sum().backward()
    expected.sum().backward()
    for p, q in zip([hidden, *head.parameters()], [wide, *truth.parameters()], strict=True):
        assert (p.grad - q.grad).norm() / q.grad.norm() < 0.01


@pytest.mark.parametrize("own_gates", [0, 15, V])
def test_priors(own_gates: int) -> None:
    """One row for each class with gates of its own, in the order of ``own``, one for the rest."""
    head = randomise(build(own_gates), scale=3.0)
    hidden = draw(6, 4, D)
    pi = head.priors(hidden)
    assert pi.shape == (6, 4, own_gates + 1, 4)
    assert (pi >= 0).all()
    assert (pi <= 1).all()
    torch.testing.assert_close(pi.sum(-1), torch.ones(6, 4, own_gates + 1))
    expected = priors(head, hidden.view(24, D)).view(6, 4, V, 4)
    torch.testing.assert_close(pi[:, :, gate_row(head)], expected)


def test_order_decides_who_has_gates() -> None:
    head = build(5)
    assert torch.equal(head.own, ORDER[:5])
    head = build(5, order=None)
    assert torch.equal(head.own, torch.arange(5))
    assert build(None).own_gates == 4  # a tenth of 37, rounded up
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
    shared = randomise(build(0)).double()
    own = build(V).double()
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
    head = randomise(build(0)).double()
    hidden = draw(1, D, dtype=torch.float64)
    other = MixtureOfContexts(D, V, components=4, latent_features=7).double()
    prior = head.priors(hidden)[0, 0].log()
    with torch.no_grad():
        other.weight.copy_(head.weight)
        other.bias.copy_(head.bias)
        other.latent.load_state_dict(head.latent.state_dict())
        other.prior.weight.copy_(prior[:, None] * hidden / hidden.square().sum())
    torch.testing.assert_close(other.log_prob(hidden), head.log_prob(hidden))


@pytest.mark.parametrize("own_gates", [0, 15, V])
def test_initial_values(own_gates: int) -> None:
    counts = 10.0 ** np.linspace(0, 6, V)
    counts[3] = 0
    head = build(own_gates, frequencies=counts)
    assert head.weight.abs().max() <= 0.1
    assert not any(b.any() for b in (head.latent.bias, head.gate_hidden.bias, head.gate_bias))
    assert (head.gate_weight.abs() <= 0.1).all()
    check_unigram(head, counts)


def test_frequent_classes_have_their_own_gates() -> None:
    counts = (np.arange(V) * 7 % 11).astype(np.int64)
    head = Mixtape(D, V, frequencies=counts, own_gates=9)
    chosen = counts[head.own.numpy()]
    assert (np.diff(chosen) <= 0).all()
    rest = np.delete(counts, head.own.numpy())
    assert chosen.min() >= rest.max()


def test_saved_with_its_order(tmp_path: Any) -> None:
    head = randomise(build())
    head.save(tmp_path / "head")
    other: Any = load_head(tmp_path / "head")
    assert torch.equal(other.own, head.own)
    assert torch.equal(copy.deepcopy(head).own, head.own)
    empty: Head = randomise(build(0))
    empty.save(tmp_path / "head")
    hidden = draw(4, D)
    assert torch.equal(load_head(tmp_path / "head").log_prob(hidden), empty.log_prob(hidden))


def test_state_dict_names() -> None:
    """Saved files depend on them."""
    assert sorted(build().state_dict()) == [
        "_extra_state",
        "bias",
        "gate_bias",
        "gate_context.weight",
        "gate_hidden.bias",
        "gate_hidden.weight",
        "gate_weight",
        "latent.bias",
        "latent.weight",
        "weight",
    ]
    assert list(saved_tables(build().state_dict())) == ["own"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"own_gates": -1}, "own_gates: expected a whole number of at least 0, got -1"),
        ({"own_gates": V + 1}, r"own_gates: expected 0 to 37 \(n_classes\), got 38"),
        ({"gate_features": 0}, "gate_features: expected a whole number of at least 1, got 0"),
        ({"latent_features": 0}, "latent_features: expected a whole number of at least 1, got 0"),
        ({"order": torch.zeros(V, dtype=torch.int64)}, r"order: expected a permutation of 0\.\.36"),
        ({"order": torch.arange(V - 1)}, r"order: expected a permutation of 0\.\.36"),
        ({"order": torch.arange(V).int()}, r"order: .* int64 \[37\]"),
        ({"order": torch.arange(V).float()}, r"order: .* int64 \[37\]"),
        (
            {"embedding": torch.nn.Embedding(V, D), "latent_features": 7},
            r"embedding: expected a weight of shape \(37, 7\) to tie to, got \(37, 10\)",
        ),
        ({"in_features": 0}, "in_features: expected a whole number of at least 1, got 0"),
        ({"n_classes": 0}, "n_classes: expected a whole number of at least 1, got 0"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Mixtape(**({"in_features": D, "n_classes": V} | options))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_step_holds_no_tensor_of_all_logits(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, classes = 400, 1500
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 2**18)
    head = build(150, D, classes, order=None, reduction=reduction)
    hidden = draw(rows, D).requires_grad_()
    target = draw_targets(rows, n_classes=classes)
    largest, most = allocations(lambda: head(hidden, target).loss.sum().backward())
    assert largest < rows * classes * 4 / 8
    assert most < rows * classes * 4 / 2
