"""Acceptance of drafted classes, and divergence from the target."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree import Softmax, TreeEnsemble
from hstree.decoding import acceptance, agreement, expected_acceptance

V, D = 30, 6


def log_probs(*size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, V, generator=generator, dtype=torch.float64).mul(2).log_softmax(-1)


def test_is_the_share_that_speculative_sampling_accepts() -> None:
    """200,000 draws from the draft, each accepted with probability min(1, p / q)."""
    p, q = log_probs(seed=0).exp().numpy(), log_probs(seed=1).exp().numpy()
    generator = np.random.default_rng(0)
    drawn = generator.choice(V, 200_000, p=q)
    accepted = generator.random(len(drawn)) < p[drawn] / q[drawn]
    expected = expected_acceptance(torch.from_numpy(p).log(), torch.from_numpy(q).log())
    assert expected.item() == pytest.approx(accepted.mean(), abs=5e-3)


def test_is_one_minus_the_total_variation() -> None:
    p, q = log_probs(2, 3, seed=2), log_probs(2, 3, seed=3)
    expected = 1 - (p.exp() - q.exp()).abs().sum(-1) / 2
    torch.testing.assert_close(expected_acceptance(p, q), expected)
    torch.testing.assert_close(expected_acceptance(p, p), torch.ones(2, 3).double())


def test_impossible_classes() -> None:
    p = torch.tensor([0.0, 0.25, 0.75]).log()
    q = torch.tensor([0.5, 0.5, 0.0]).log()
    assert expected_acceptance(p, q).item() == pytest.approx(0.25)
    assert expected_acceptance(p, q.flip(0)).item() == pytest.approx(0.75)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"draft: expected shape \[2, 30\], got \[30\]"):
        expected_acceptance(log_probs(2, seed=0), log_probs(seed=0))


def test_agreement_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks of contexts, here of two, of any leading dimensions."""
    monkeypatch.setattr(acceptance, "default_chunk_rows", lambda tensor, columns: 2)
    target, draft = Softmax(D, V), TreeEnsemble.from_counts(D, range(V, 0, -1), root=5)
    with torch.no_grad():
        target.weight.normal_(generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(3, 5, D, generator=torch.Generator().manual_seed(1))
    found = agreement(target, draft, hidden)
    p, q = target.log_prob(hidden).detach(), draft.log_prob(hidden).detach()
    torch.testing.assert_close(found.acceptance, torch.minimum(p.exp(), q.exp()).sum(-1))
    torch.testing.assert_close(found.divergence, (p.exp() * (p - q)).sum(-1))
    assert not found.divergence.requires_grad


def test_agreement_of_other_sizes() -> None:
    hidden = torch.randn(2, D)
    for draft, message in (
        (Softmax(D, V + 1), f"draft: expected n_classes = {V}, that of the model's head, got 31"),
        (Softmax(D + 2, V), f"draft: expected in_features = {D}, that of the model's head, got 8"),
    ):
        with pytest.raises(ValueError, match=message):
            agreement(Softmax(D, V), draft, hidden)
