"""Mean features of labels, from each kind of features and labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch

from hstree import Softmax
from hstree.heads import TreeEnsemble
from hstree.trees import cluster_tree, label_means, padded_labels
from hstree.trees.labels import MOST_FEATURES, label_pairs

N, F, V = 40, 5, 7


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features [N, F], and for each row two different labels or one."""
    random = torch.Generator().manual_seed(0)
    labels = torch.rand(N, V, generator=random).argsort(1)[:, :2]
    labels[::3, 1] = -1
    return torch.randn(N, F, generator=random), labels


def as_matrix(labels: torch.Tensor) -> Any:
    dense = np.zeros((N, V))
    for row, classes in enumerate(labels.tolist()):
        dense[row, [c for c in classes if c >= 0]] = 1.0
    return dense


def reference(features: torch.Tensor, labels: torch.Tensor) -> tuple[Any, list[int]]:
    """The formulas label by label, with numpy.cov of the residuals."""
    of = [features[(labels == c).any(1)].double().numpy() for c in range(V)]
    everything = np.concatenate(of)
    mean = everything.mean(0)
    residual = np.concatenate([rows - rows.mean(0) for rows in of if len(rows)])
    within = np.cov(residual.T, bias=True) + 1e-6 * np.mean(everything**2) * np.eye(F)
    shrunk = np.stack([(rows.sum(0) + 8 * mean) / (len(rows) + 8) for rows in of])
    whitened = (shrunk - mean) @ np.linalg.inv(np.linalg.cholesky(within)).T
    return whitened, [len(rows) for rows in of]


def as_sparse(labels: torch.Tensor) -> Any:
    return scipy.sparse.csr_array(as_matrix(labels))


@pytest.mark.parametrize("of_features", [torch.clone, np.asarray, scipy.sparse.csr_array])
@pytest.mark.parametrize("of_labels", [torch.clone, np.asarray, torch.Tensor.tolist, as_sparse])
def test_means_are_those_of_the_rows(of_features: Any, of_labels: Any) -> None:
    features, labels = data()
    vectors, counts = label_means(of_features(features), of_labels(labels), V)
    expected, n = reference(features, labels)
    assert counts.tolist() == n
    assert (vectors.dtype, vectors.shape) == (torch.float32, (V, F))
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6 * abs(expected).max())


def test_a_label_without_a_row_has_the_vector_zero() -> None:
    features, labels = data()
    vectors, counts = label_means(features, labels, V + 1)
    assert counts[V] == 0
    assert not vectors[V].any()


@pytest.mark.parametrize("n", [1, 3, 10])
def test_fewer_rows_than_features(n: int) -> None:
    features, labels = data()
    assert label_means(features[:n], labels[:n], V)[0].isfinite().all()


def test_invertible_maps_of_the_features_only_rotate() -> None:
    features, labels = data()
    linear = torch.randn(F, F, generator=torch.Generator().manual_seed(1)) + 3 * torch.eye(F)
    one, _ = label_means(features, labels, V)
    other, _ = label_means(features @ linear + 1.0, labels, V)
    torch.testing.assert_close(one @ one.T, other @ other.T, rtol=1e-3, atol=1e-3)


def test_alike_labels_are_clustered() -> None:
    """Along a direction in which the features vary little."""
    random = np.random.default_rng(2)
    labels = random.integers(0, 30, 6000)
    features = random.standard_normal((6000, F)) * 3.0 ** np.arange(F)
    features[:, 0] += 3 * (labels % 2)
    vectors, counts = label_means(features, labels, 30)
    halves = cluster_tree(vectors, clusters=2).to_nested()
    assert sorted(len({c % 2 for c in half}) for half in halves) == [1, 1]
    head = TreeEnsemble.from_vectors(4, vectors, frequencies=counts, n_trees=1, clusters=2)
    assert sorted(len({c % 2 for c in half}) for half in head.trees[0].to_nested()) == [1, 1]
    prob = head.log_prob(torch.zeros(4)).exp()  # the distribution of the labels
    torch.testing.assert_close(prob, (counts / counts.sum()).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, scipy.sparse.csr_array])
def test_many_features_keep_their_distances(kind: Any) -> None:
    """Of rank F, so that the projection loses nothing."""
    features, labels = data()
    wide = features @ torch.randn(F, 3 * MOST_FEATURES)
    found, _ = label_means(kind(wide.numpy()), labels, V)
    axes = torch.linalg.svd(wide, full_matrices=False)[2][:F]
    expected, _ = label_means(wide @ axes.T, labels, V)
    torch.testing.assert_close(
        torch.cdist(found, found), torch.cdist(expected, expected), atol=1e-4, rtol=1e-4
    )


def test_entries_that_are_zero_are_no_labels() -> None:
    stored = scipy.sparse.csr_array(([1.0, 0.0], ([0, 1], [2, 3])), shape=(2, 4))
    rows, classes, n_rows = label_pairs(stored, 4)
    assert (rows.tolist(), classes.tolist(), n_rows) == ([0], [2], 2)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "lil", "dok"])
def test_padded_labels_are_the_entries_of_each_row(kind: str) -> None:
    _, labels = data()
    labels[5] = -1  # a row without any
    got = padded_labels(as_sparse(labels).asformat(kind))
    wanted = labels.sort(1).values
    wanted[::3] = wanted[::3].flip(1)  # -1 behind the one label
    assert torch.equal(got, wanted)
    assert padded_labels(as_sparse(labels)[:0]).shape == (0, 0)
    assert padded_labels(0 * as_sparse(labels)).shape == (N, 0)


def test_padded_labels_are_targets_of_the_loss() -> None:
    """The loss over the table is the mean over the entries of the matrix."""
    features, labels = data()
    head = Softmax(F, V, ignore_index=-1)
    target = padded_labels(as_sparse(labels))
    got = head(features.repeat_interleave(target.shape[1], 0), target.flatten()).loss
    matrix = torch.from_numpy(as_matrix(labels)).bool()
    torch.testing.assert_close(got, -head.log_prob(features)[matrix].mean())


def test_padded_labels_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"matrix: expected a sparse matrix of scipy, got ndarray"):
        padded_labels(np.eye(3))


@pytest.mark.parametrize(
    ("features", "labels", "match"),
    [
        (torch.zeros(3), [0, 1, 2], r"features: expected shape \[N, F\], got \[3\]"),
        (torch.zeros(2, 3), [0, 1, 2], "labels: expected 2 rows, as many as features, got 3"),
        (torch.zeros(4, 3), [0, 1, 2], "labels: expected 4 rows, as many as features, got 3"),
        (torch.zeros(2, 3), as_sparse(data()[1]), f"labels: expected 2 rows, .*, got {N}"),
        (torch.zeros(2, 3), [-1, -1], "labels: expected at least one label, got none"),
        (torch.zeros(2, 3), [0, 1], r"features: expected a finite positive .* got 0\.0"),
        (torch.full((2, 3), torch.inf), [0, 1], "features: expected a finite positive .* got inf"),
        (torch.zeros(2, 3), [0, V], f"labels: expected classes below {V}, got {V}"),
        (
            torch.zeros(2, 3),
            [0.5, 1.0],
            r"labels: expected classes, integers \[N\] or \[N, K\], got",
        ),
        (torch.zeros(2, 3), scipy.sparse.csr_array((2, 3)), f"matrix with {V} columns, got"),
        (torch.zeros(2, 3), [[0, 1], [2]], "with -1 where a row has fewer.*pad_sequence.*got list"),
        (
            torch.zeros(3, 3),
            torch.eye(3).to_sparse(),
            r"layout torch.sparse_coo; with x = .*scipy.sparse.coo_array",
        ),
    ],
)
def test_bad_data(features: Any, labels: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        label_means(features, labels, V)


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8, np.float32])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_a_matrix_of_0_and_1_is_no_table_of_classes(kind: Any, dtype: Any) -> None:
    """Refused with the way, which then gives what the table of classes gives."""
    features, labels = data()
    matrix = kind(as_matrix(labels).astype(dtype))
    with pytest.raises(ValueError, match=r"labels: expected classes, .*csr_array\(labels\)$"):
        label_means(features, matrix, V)
    of_matrix = label_means(features, scipy.sparse.csr_array(matrix), V)
    torch.testing.assert_close(of_matrix, label_means(features, labels, V))


def test_the_way_for_tensors_that_are_sparse() -> None:
    labels = torch.tensor([[0, 1, 1], [0, 0, 1]]).to_sparse()
    x = labels.to_sparse_coo().coalesce()
    matrix = scipy.sparse.coo_array((x.values(), x.indices()), tuple(x.shape))
    assert padded_labels(matrix).tolist() == [[1, 2], [2, -1]]
    assert [part.tolist() for part in label_pairs(matrix, 3)[:2]] == [[0, 0, 1], [1, 2, 2]]
