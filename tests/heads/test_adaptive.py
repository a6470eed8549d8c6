from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from heads.support import D, V, draw, draw_targets
from hstree.heads import AdaptiveSoftmax


@pytest.mark.parametrize("permuted", [False, True])
def test_equals_torch(permuted: bool, device: torch.device) -> None:
    """torch's module with the classes in the order of their frequency."""
    order = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    order = order if permuted else torch.arange(V)
    head = AdaptiveSoftmax(D, V, cutoffs=(5, 20), div_value=2.0, order=order).to(device)
    other = torch.nn.AdaptiveLogSoftmaxWithLoss(D, V, [5, 20], div_value=2.0).to(device)
    other.load_state_dict(head.adaptive.state_dict())
    hidden, target = draw(40, D).to(device), draw_targets(40).to(device)
    rank = order.argsort().to(device)
    expected = other(hidden, rank[target])
    output, loss = head(hidden, target)
    torch.testing.assert_close(output, expected.output)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(head.log_prob(hidden), other.log_prob(hidden)[:, rank])
    assert torch.equal(head.predict(hidden), order.to(device)[other.predict(hidden)])


def test_ignored_rows_are_not_looked_at() -> None:
    head = AdaptiveSoftmax(D, V, cutoffs=(5,), reduction="sum")
    hidden = draw(4, D)
    hidden[1] = torch.inf
    hidden.requires_grad_()
    target = torch.tensor([3, -100, 20, 7])
    output, loss = head(hidden, target)
    assert output.isfinite().all()
    loss.backward()
    assert hidden.grad.isfinite().all()
    loss = head(hidden, torch.full((4,), -100)).loss
    assert loss == 0


@pytest.mark.parametrize(
    ("n_classes", "cutoffs"), [(3, [1]), (100, [25]), (5000, [2000]), (30000, [2000, 10000])]
)
def test_default_cutoffs(n_classes: int, cutoffs: list[int]) -> None:
    assert AdaptiveSoftmax(16, n_classes).cutoffs == cutoffs


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_classes": 2}, "n_classes: expected at least 3 for an adaptive softmax, got 2"),
        ({"cutoffs": []}, r"cutoffs: expected increasing sizes in \[1, 36\], got \[\]"),
        ({"cutoffs": [5, 5]}, r"cutoffs: expected increasing .* got \[5, 5\]"),
        ({"cutoffs": [0, 5]}, r"cutoffs: expected increasing .* got \[0, 5\]"),
        ({"cutoffs": [5, V]}, r"cutoffs: expected increasing .* got \[5, 37\]"),
        ({"cutoffs": [5, 9]}, r"div_value: expected at least 1 feature .* got 10 // 4.0\*\*2 = 0"),
        ({"cutoffs": [5.5]}, "cutoffs: expected a whole number of at least 0, got 5.5"),
        ({"cutoffs": 5}, "cutoffs: expected a sequence of numbers, got 5"),
        ({"div_value": 0}, "div_value: expected a finite positive number, got 0"),
        ({"order": list(range(V))}, r"order: expected a tensor int64 \[37\], got <class 'list'>"),
        ({"order": torch.zeros(V, dtype=torch.int64)}, "order: expected a permutation of 0..36"),
        ({"order": torch.arange(V - 1)}, "order: expected a permutation of 0..36"),
        ({"order": torch.arange(V).int()}, r"order: expected a permutation of 0..36, int64 \[37\]"),
        ({"order": torch.arange(V).float()}, r"order: expected a permutation of 0..36, int64"),
    ],
    ids=lambda x: str(getattr(x, "__name__", x))[:40],
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    options = {"n_classes": V, "cutoffs": [5]} | options
    with pytest.raises(ValueError, match=match):
        AdaptiveSoftmax(D, **options)


def test_frequent_classes_come_first() -> None:
    counts = np.arange(V)[::-1] % 5
    head = AdaptiveSoftmax(D, V, frequencies=counts, cutoffs=(6,))
    ranked = counts[head.order.numpy()]
    assert (np.diff(ranked) <= 0).all()
