"""The warning about a loss above that of the class frequencies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import hstree
from hstree.heads.watch import BATCHES

V, D = 50, 8
COUNTS = torch.arange(V, 0, -1.0)


def train(head: hstree.Head, lr: float, batches: int, ignored: bool = False) -> list[str]:
    """Trained on features that say nothing; the warnings."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(head.parameters(), lr=lr)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(batches):
            target = torch.multinomial(COUNTS, 32, replacement=True)
            target = torch.full_like(target, -100) if ignored else target
            loss = head(torch.randn(32, D), target).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [str(warning.message) for warning in caught]


def heads() -> list[Any]:
    options: dict[str, Any] = {"n_trees": 2, "root": 7, "levels": 2}
    return [
        pytest.param(lambda: hstree.Softmax(D, V, frequencies=COUNTS), id="softmax"),
        pytest.param(lambda: hstree.TreeEnsemble.from_counts(D, COUNTS, **options), id="trees"),
    ]


@pytest.mark.parametrize("make", heads())
def test_warns_once_where_training_does_harm(make: Any) -> None:
    (message,) = train(make(), lr=30.0, batches=3 * BATCHES)
    assert "nats above that of the class frequencies" in message
    assert "parameter_groups(lr, hidden=...)" in message


@pytest.mark.parametrize("make", heads())
def test_is_silent_where_it_does_none(make: Any) -> None:
    head = make()
    if isinstance(head, hstree.Softmax):
        torch.nn.init.zeros_(head.weight)
    assert train(head, lr=1e-3, batches=2 * BATCHES) == []
    assert train(make(), lr=30.0, batches=2 * BATCHES, ignored=True) == []


def test_is_silent_without_frequencies_in_evaluation_and_in_short_trainings() -> None:
    assert train(hstree.Softmax(D, V), lr=30.0, batches=2 * BATCHES) == []
    assert train(hstree.Softmax(D, V, frequencies=COUNTS), lr=30.0, batches=BATCHES - 1) == []
    head = hstree.Softmax(D, V, frequencies=COUNTS).eval()
    assert train(head, lr=30.0, batches=2 * BATCHES) == []
