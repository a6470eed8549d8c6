"""Class vectors from mean hidden states, against numpy class by class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hstree.trees import ContextMeans, cluster_tree

V, D = 30, 6


def contexts(n=2000, seed=0):
    """Hidden states about the mean of their class; the last class has none, class 0 has one."""
    random = np.random.default_rng(seed)
    target = random.integers(1, V - 1, n)
    target[n // 2] = 0
    spread = 0.4 * random.standard_normal((D, D)) + np.diag(1.0 + np.arange(D))
    hidden = random.standard_normal((V, D))[target] + random.standard_normal((n, D)) @ spread + 0.5
    return torch.from_numpy(hidden).float(), torch.from_numpy(target)


def collected(hidden, target, n_classes=V):
    means = ContextMeans(n_classes, hidden.shape[-1])
    means.add(hidden, target)
    return means


def reference(hidden, target, shrinkage):
    """The formulas, with numpy.cov of the residuals."""
    hidden, target = hidden.double().numpy(), target.numpy()
    mean, residual = hidden.mean(0), hidden.copy()
    shrunk = np.tile(mean, (V, 1))
    for y in range(V):
        own = hidden[target == y]
        if len(own):
            residual[target == y] -= own.mean(0)
            shrunk[y] = (own.sum(0) + shrinkage * mean) / (len(own) + shrinkage)
    within = np.cov(residual.T, bias=True) + 1e-6 * np.mean(hidden**2) * np.eye(D)
    return (shrunk - mean) @ np.linalg.inv(np.linalg.cholesky(within)).T


@pytest.mark.parametrize("shrinkage", [0, 0.5, 8.0, 1e6])
def test_formula(shrinkage):
    hidden, target = contexts()
    means = collected(hidden, target)
    vectors = means.vectors(shrinkage)
    assert (vectors.dtype, vectors.shape) == (torch.float32, (V, D))
    expected = reference(hidden, target, shrinkage)
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6 * abs(expected).max())
    assert (vectors[-1] == 0).all()
    np.testing.assert_allclose(means.mean, hidden.double().mean(0), rtol=1e-12)


def test_default_shrinkage():
    means = collected(*contexts())
    assert torch.equal(means.vectors(), means.vectors(8.0))


def test_within_class_variance_is_one():
    hidden, target = contexts(50_000)
    vectors = collected(hidden, target).vectors(0)
    residual = torch.cat([hidden[target == y] - hidden[target == y].mean(0) for y in range(V)])
    # The linear map from the means to the vectors, from the classes with many contexts.
    offset = collected(hidden, target)
    mean = offset.sum[1:-1] / offset.count[1:-1, None] - offset.mean
    linear = torch.linalg.lstsq(mean, vectors[1:-1].double()).solution
    covariance = np.cov((residual.double() @ linear).T.numpy(), bias=True)
    np.testing.assert_allclose(covariance, np.eye(D), atol=1e-4)


def test_sums_are_exact_and_can_be_added():
    """In the order of the contexts, whatever the parts; also of processes and other dtypes."""
    hidden, target = contexts(20_000)
    hidden = hidden.bfloat16()
    whole = collected(hidden, target)
    total = np.zeros((V, D))
    np.add.at(total, target.numpy(), hidden.double().numpy())
    assert np.array_equal(whole.sum, total)
    assert whole.count.tolist() == np.bincount(target, minlength=V).tolist()
    exact = hidden.double().T @ hidden.double()
    torch.testing.assert_close(whole.second_moment, exact, rtol=1e-12, atol=0)

    parts = collected(hidden[:9000].view(90, 100, D), target[:9000].view(90, 100))
    parts.add(hidden[9000:], target[9000:])
    assert torch.equal(parts.sum, whole.sum)
    other = collected(hidden[9000:], target[9000:])
    first = collected(hidden[:9000], target[:9000])
    for name in ("count", "sum", "second_moment"):
        getattr(other, name).add_(getattr(first, name))
    torch.testing.assert_close(other.vectors(), whole.vectors(), rtol=1e-5, atol=1e-6)


def test_invertible_maps_of_the_hidden_states_do_not_change_clusters():
    random = np.random.default_rng(1)
    hidden, target = contexts()
    linear = torch.from_numpy(random.standard_normal((D, D)) + 3 * np.eye(D)).float()
    means, mapped = collected(hidden, target), collected(hidden @ linear + 1.0, target)
    one, other = means.vectors(), mapped.vectors()
    torch.testing.assert_close(one @ one.T, other @ other.T, rtol=1e-3, atol=1e-3)
    plain = [means.sum / means.count.clamp(min=1)[:, None] for means in (means, mapped)]
    trees = [cluster_tree(vectors, means.count, root=4) for vectors in (one, other, *plain)]
    assert trees[0] == trees[1]
    assert trees[2] != trees[3]  # without whitening they do change


def test_clusters_that_are_in_the_contexts_are_found():
    """Classes with alike contexts, along a direction in which the hidden states vary little."""
    random = np.random.default_rng(2)
    target = random.integers(0, V, 6000)
    hidden = random.standard_normal((6000, D)) * 3.0 ** np.arange(D)
    hidden[:, 0] += 3 * (target % 2)
    vectors = collected(torch.from_numpy(hidden), torch.from_numpy(target)).vectors()
    halves = cluster_tree(vectors, balance="count", root=2, levels=2).to_nested()
    assert sorted(len({c % 2 for c in half}) for half in halves) == [1, 1]


@pytest.mark.parametrize("n", [1, 3, 10])
def test_fewer_contexts_than_features(n):
    hidden, target = contexts(n)
    assert collected(hidden, target).vectors().isfinite().all()


def test_no_graph_is_kept():
    hidden, target = contexts(10)
    means = collected(hidden.requires_grad_(), target)
    assert not means.sum.requires_grad
    assert not means.second_moment.requires_grad


@pytest.mark.parametrize(
    ("hidden", "target", "message"),
    [
        (
            torch.ones(2, 3),
            torch.tensor([0, 1]),
            r"hidden: expected .* \[\.\.\., 6\], got .*\(2, 3",
        ),
        (torch.ones(2, D).long(), torch.tensor([0, 1]), "hidden: expected floating .*torch.int64"),
        (torch.ones(2, D), torch.tensor([0]), r"target: .* of shape \(2,\), got .* \(1,\)"),
        (torch.ones(1, D), torch.tensor([0.0]), "target: expected torch.int64 .* torch.float32"),
        (torch.ones(2, D), torch.tensor([0, V]), f"target: .* from 0 to {V - 1}, got {V}"),
        (torch.ones(2, D), torch.tensor([-1, 0]), "target: expected classes from 0 .* got -1"),
    ],
)
def test_bad_contexts(hidden, target, message):
    means = ContextMeans(V, D)
    with pytest.raises(ValueError, match=message):
        means.add(hidden, target)
    assert means.count.sum() == 0


def test_nothing_to_average():
    with pytest.raises(ValueError, match="contexts: expected at least one, got none"):
        ContextMeans(V, D).vectors()
    zero = collected(torch.zeros(3, D), torch.arange(3))
    with pytest.raises(ValueError, match=r"hidden: expected a finite positive .* got 0\.0"):
        zero.vectors()
    infinite = collected(torch.full((3, D), torch.inf), torch.arange(3))
    with pytest.raises(ValueError, match=r"hidden: expected a finite positive .* got inf"):
        infinite.vectors()
    with pytest.raises(ValueError, match=r"shrinkage: .* at least 0, got -1"):
        collected(*contexts(9)).vectors(-1)
