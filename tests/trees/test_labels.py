"""Mean features of labels, from each kind of features and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from hstree.trees import label_means
from hstree.trees.labels import MOST_FEATURES, label_pairs

N, F, V = 40, 5, 7


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [N, F], and for each row two different labels or one."""
    random = torch.Generator().manual_seed(0)
    labels = torch.rand(N, V, generator=random).argsort(1)[:, :2]
    labels[::3, 1] = -1
    return torch.randn(N, F, generator=random), labels


def as_sparse(labels: torch.Tensor) -> Any:
    dense = np.zeros((N, V))
    for row, classes in enumerate(labels.tolist()):
        dense[row, [c for c in classes if c >= 0]] = 1.0
    return scipy.sparse.csr_array(dense)


@pytest.mark.parametrize("of_features", [torch.clone, np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("of_labels", [torch.clone, np.asarray, torch.Tensor.tolist, as_sparse])
def test_means_are_those_of_the_rows(of_features: Any, of_labels: Any) -> None:
    features, labels = data()
    means = label_means(of_features(features), of_labels(labels), V)
    for c in range(V):
        rows = features[(labels == c).any(1)]
        assert means.count[c] == len(rows)
        torch.testing.assert_close(means.sum[c], rows.double().sum(0))


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_many_features_keep_their_distances(kind: Any) -> None:
    """Of rank F, so that the projection loses nothing."""
    features, labels = data()
    wide = features @ torch.randn(F, 3 * MOST_FEATURES)
    means = label_means(kind(wide.numpy()), labels, V)
    wanted = label_means(wide @ torch.linalg.svd(wide, full_matrices=False)[2][:F].T, labels, V)
    found, expected = (m.sum / m.count[:, None] for m in (means, wanted))
    torch.testing.assert_close(
        torch.cdist(found, found), torch.cdist(expected, expected), atol=1e-4, rtol=1e-4
    )


def test_entries_that_are_zero_are_no_labels() -> None:
    stored = scipy.sparse.csr_array(([1.0, 0.0], ([0, 1], [2, 3])), shape=(2, 4))
    rows, classes = label_pairs(stored, 4)
    assert (rows.tolist(), classes.tolist()) == ([0], [2])


@pytest.mark.parametrize(
    ("features", "labels", "match"),
    [
        (torch.zeros(3), [0, 1, 2], r"features: expected shape \[N, F\], got \[3\]"),
        (torch.zeros(2, 3), [0, 1, 2], "labels: expected those of the 2 rows.*, got 3 rows"),
        (torch.zeros(2, 3), [-1, -1], "labels: expected those of the 2 rows.*, got none"),
        (torch.zeros(2, 3), [0, V], f"labels: expected classes below {V}, got {V}"),
        (torch.zeros(2, 3), [0.5, 1.0], r"labels: expected integers \[N\] or \[N, K\], got torch"),
        (torch.zeros(2, 3), scipy.sparse.csr_array((2, 3)), f"matrix with {V} columns, got"),
    ],
)
def test_bad_data(features: Any, labels: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        label_means(features, labels, V)
