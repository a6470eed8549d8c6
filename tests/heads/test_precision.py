"""Precision at k, beside a loop over the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from hstree.heads import precision_at_k

V = 9


@pytest.mark.parametrize("k", [1, 3, 5])
def test_equals_a_loop(k: int) -> None:
    random = torch.Generator().manual_seed(k)
    predicted = torch.rand(30, V, generator=random).argsort(1)[:, :5]
    labels = torch.rand(30, V, generator=random).argsort(1)[:, :4]
    labels[torch.rand(30, 4, generator=random) < 0.4] = -1
    rows = [{c for c in row if c >= 0} for row in labels.tolist()]
    hits = [len(set(row[:k]) & there) for row, there in zip(predicted.tolist(), rows, strict=True)]
    wanted = sum(hits) / (30 * k)
    dense = np.array([[c in row for c in range(V)] for row in rows])
    for given in (labels, scipy.sparse.csr_array(dense)):
        assert precision_at_k(predicted, given, V, k) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("predicted", "labels", "k", "match"),
    [
        (torch.zeros(3, dtype=torch.int64), [0, 1, 2], 1, r"predicted: expected shape \[N, K\]"),
        (torch.zeros(0, 3, dtype=torch.int64), [], 1, r"predicted: expected shape \[N, K\]"),
        (torch.zeros(2, 3, dtype=torch.int64), [0, 1], 4, "k: expected"),
        (torch.zeros(2, 3, dtype=torch.int64), [0, 1, 2], 1, "labels: expected 2 rows, got 3"),
    ],
)
def test_bad_arguments(predicted: torch.Tensor, labels: Any, k: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        precision_at_k(predicted, labels, V, k)
