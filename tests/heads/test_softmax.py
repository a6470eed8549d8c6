from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from heads.support import FREQUENCIES, D, V, draw, draw_targets
from hstree.heads import Softmax


def test_equals_linear_and_cross_entropy(device: torch.device) -> None:
    head = Softmax(D, V, frequencies=FREQUENCIES).to(device)
    hidden, target = draw(20, D).to(device), draw_targets(20).to(device)
    logits = F.linear(hidden, head.weight, head.bias)
    assert torch.equal(head.log_prob(hidden), logits.log_softmax(-1))
    torch.testing.assert_close(head(hidden, target).loss, F.cross_entropy(logits, target))


def test_initial_values() -> None:
    head = Softmax(D, V)
    assert head.weight.abs().max() <= 0.1
    assert not head.bias.any()
    head = Softmax(D, V, bias=False)
    assert head.bias is None
    counts = FREQUENCIES.copy()
    counts[3] = 0
    head = Softmax(D, V, frequencies=counts)
    mass = np.where(counts, counts, counts[counts > 0].min() / 2)
    prob = head.log_prob(torch.zeros(D)).exp().detach().numpy()
    np.testing.assert_allclose(prob, mass / mass.sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("frequencies", "match"),
    [
        (np.ones(V - 1), r"frequencies: expected shape \(37,\), got \(36,\)"),
        (np.full(V, -1.0), r"frequencies: expected finite values .* got -1.0 at index 0"),
        (np.array([1.0] * (V - 1) + [np.nan]), r"got nan at index 36"),
    ],
    ids=["shape", "negative", "nan"],
)
def test_bad_frequencies(frequencies: np.ndarray, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Softmax(D, V, frequencies=frequencies)


def test_no_counts_at_all_are_all_equal() -> None:
    head = Softmax(D, V, frequencies=np.zeros(V))
    np.testing.assert_allclose(head.bias.detach().numpy(), -np.log(V), rtol=1e-6)


def test_tied_weight_gets_both_gradients() -> None:
    embedding = torch.nn.Embedding(V, D)
    head = Softmax(D, V, embedding=embedding)
    target = draw_targets(6)
    head(embedding(target), target).loss.backward()
    twin = embedding.weight.detach().clone().requires_grad_()
    F.cross_entropy(twin[target] @ twin.t() + head.bias.detach(), target).backward()
    torch.testing.assert_close(embedding.weight.grad, twin.grad)


def test_one_class() -> None:
    head = Softmax(D, 1)
    assert not head(draw(3, D), torch.zeros(3, dtype=torch.int64)).output.any()
