"""Word vectors against a dense twin, by inner products, which no sign of an axis changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hstree.trees import cluster_tree, word_vectors


def text(n_tokens, n_classes, seed=0):
    """Tokens with structure: a class is mostly followed by one of a few classes."""
    random = np.random.default_rng(seed)
    successors = random.integers(0, n_classes, (n_classes, 3))
    tokens = [0]
    for _ in range(n_tokens - 1):
        follow = random.random() < 0.7
        following = successors[tokens[-1], random.integers(3)] if follow else None
        tokens.append(int(random.integers(n_classes)) if following is None else int(following))
    return tokens


def neighbour_counts(tokens, n_classes, context, window):
    """n(w, c) as a dense array; for "both" the following words are further columns."""
    preceding = np.zeros((n_classes, n_classes))
    for i, w in enumerate(tokens):
        for d in range(1, window + 1 if context == "window" else 2):
            if i - d >= 0:
                preceding[w, tokens[i - d]] += 1
    if context == "left":
        return [preceding]
    if context == "both":
        return [preceding, preceding.T]
    return [preceding + preceding.T]


def ppmi(counts, alpha):
    total = counts.sum()
    smoothed = counts.sum(axis=0) ** alpha * (counts.sum(axis=0) > 0)
    found = np.zeros_like(counts)
    for w, c in zip(*np.nonzero(counts), strict=True):
        p_word = counts[w].sum() / total
        p_context = smoothed[c] / smoothed.sum()
        found[w, c] = max(0.0, math.log(counts[w, c] / total / (p_word * p_context)))
    return found


def reference(
    tokens,
    n_classes,
    context="left",
    window=2,
    n_features=100,
    alpha=1.0,
    frequency_power=0.0,
    singular_power=1.0,
    normalize=True,
):
    counts = neighbour_counts(tokens, n_classes, context, window)
    association = np.hstack([ppmi(c, alpha) for c in counts])
    weight = np.bincount(tokens, minlength=n_classes) ** float(frequency_power)
    _, singular, axes = np.linalg.svd(weight[:, None] * association, full_matrices=False)
    keep = min(n_features, n_classes, int((singular > 1e-10 * singular[0]).sum()))
    scale = (singular[:keep] / singular[0]) ** (singular_power - 1)
    vectors = association @ axes[:keep].T * scale
    if normalize:
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = np.divide(vectors, length, where=length > 1e-9, out=np.zeros_like(vectors))
    return vectors


OPTIONS: list[dict[str, Any]] = [
    {},
    {"context": "both"},
    {"context": "window"},
    {"context": "window", "window": 4},
    {"alpha": 0.75},
    {"alpha": 0.0},
    {"frequency_power": 0.5},
    {"frequency_power": 0.5, "singular_power": 0.5},
    {"singular_power": 0.0, "normalize": False},
    {"singular_power": 2.0},
    {"normalize": False},
    {"n_features": 1},
]


@pytest.mark.parametrize(
    ("n_classes", "n_features", "options"),
    # A dense and an iterative SVD.
    [*((40, 7, options) for options in OPTIONS), (400, 12, {}), (400, 12, OPTIONS[7])],
)
def test_vectors_equal_the_reference(n_classes, n_features, options):
    options = {"n_features": n_features, **options}
    tokens = text(3000 if n_classes == 40 else 8000, n_classes)
    found = word_vectors(tokens, n_classes, **options)
    expected = reference(tokens, n_classes, **options)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=2e-4, atol=2e-5)


def test_plain_vectors_are_those_of_the_svd():
    """x = U S, up to the sign of an axis, and every axis has its largest entry positive."""
    tokens = text(3000, 40)
    association = ppmi(neighbour_counts(tokens, 40, "left", 1)[0], 1.0)
    u, singular, axes = np.linalg.svd(association)
    largest = axes[np.arange(5), np.abs(axes[:5]).argmax(axis=1)]
    expected = u[:, :5] * singular[:5] * np.sign(largest)
    found = word_vectors(tokens, 40, n_features=5, normalize=False)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_frequency_weighting_fits_frequent_classes_better():
    tokens = [min(t, 399) for t in (np.random.default_rng(0).zipf(1.4, 20_000) - 1).tolist()]
    frequencies = np.bincount(tokens, minlength=400)
    association = ppmi(neighbour_counts(tokens, 400, "left", 1)[0], 1.0)
    gram = association @ association.T
    error = {}
    for power in (0.0, 0.5):
        x = word_vectors(tokens, 400, n_features=10, frequency_power=power, normalize=False)
        lost = np.diag(gram) - (x.astype(np.float64) ** 2).sum(axis=1)  # a projection's residual
        error[power] = [(frequencies * lost).sum(), lost.sum()]
    assert error[0.5][0] < error[0.0][0]
    assert error[0.5][1] > error[0.0][1]


def test_lengths():
    tokens = text(3000, 50)
    length = np.linalg.norm(word_vectors(tokens, 50, n_features=49), axis=1)
    np.testing.assert_allclose(length, 1, rtol=1e-6)
    free = np.linalg.norm(word_vectors(tokens, 50, n_features=49, normalize=False), axis=1)
    assert free.std() > 0.1


@pytest.mark.parametrize("n_classes", [60, 500])
def test_classes_that_never_occur_have_zero_vectors(n_classes):
    tokens = np.array(text(5000, 50)) + 5
    vectors = word_vectors(tokens, n_classes, n_features=10)
    seen = np.isin(np.arange(n_classes), tokens)
    assert not vectors[~seen].any()
    assert np.abs(vectors[seen]).max(axis=1).min() > 0
    tree = cluster_tree(vectors, np.bincount(tokens, minlength=n_classes))
    assert tree.n_classes == n_classes


@pytest.mark.parametrize(
    ("tokens", "n_classes", "shape"),
    [
        ([0], 1, (1, 1)),
        ([0, 0, 0], 1, (1, 1)),
        ([1], 2, (2, 2)),
        ([0, 1], 2, (2, 2)),
        ([0] * 50, 5, (5, 5)),
        ([0, 1] * 50, 400, (400, 100)),  # of rank two
    ],
)
@pytest.mark.parametrize("context", ["left", "both", "window"])
def test_small_texts(tokens, n_classes, shape, context):
    vectors = word_vectors(tokens, n_classes, context=context, window=3)
    assert vectors.shape == shape
    assert np.isfinite(vectors).all()
    length = np.linalg.norm(vectors, axis=1)
    assert np.all((length == 0) | (np.abs(length - 1) < 1e-6))


def test_more_features_than_possible_are_reduced():
    tokens = text(500, 20)
    vectors = word_vectors(tokens, 20, n_features=1000)
    assert vectors.shape == (20, 20)
    np.testing.assert_allclose(
        vectors @ vectors.T, (e := reference(tokens, 20)) @ e.T, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("n_classes", [40, 600])
def test_deterministic(n_classes):
    tokens = text(5000, n_classes)
    first = word_vectors(np.array(tokens, np.uint16), n_classes, n_features=10)
    state = np.random.get_state()[1].tolist()  # noqa: NPY002
    np.testing.assert_array_equal(word_vectors(tokens, n_classes, n_features=10), first)
    assert np.random.get_state()[1].tolist() == state  # noqa: NPY002
    other = word_vectors(tokens, n_classes, n_features=10, seed=5)
    np.testing.assert_allclose(other, first, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([], 3), {}, ValueError, "tokens: expected at least one token, got none"),
        (([0, 1, 3], 3), {}, ValueError, r"tokens\[2\]: expected a class from 0 to 2, got 3"),
        (([0, -1], 3), {}, ValueError, r"tokens\[1\]: expected a class from 0 to 2, got -1"),
        (([0.0, 1.0], 3), {}, TypeError, "tokens: expected integers, got dtype float64"),
        (([[0, 1]], 3), {}, ValueError, r"tokens: expected a 1-D array, got shape \(1, 2\)"),
        (([0, 1], 0), {}, ValueError, "n_classes: expected a whole number from 1"),
        (([0, 1], 3), {"context": "right"}, ValueError, r"context: .*'window'.* got 'right'"),
        (
            ([0, 1], 3),
            {"window": 0},
            ValueError,
            "window: expected a whole number of at least 1, got 0",
        ),
        (
            ([0, 1], 3),
            {"n_features": 0},
            ValueError,
            "n_features: expected a whole number of at least 1, got 0",
        ),
        (([0, 1], 3), {"alpha": 1.5}, ValueError, r"alpha: .* from 0 to 1, got 1\.5"),
        (([0, 1], 3), {"alpha": float("nan")}, ValueError, "alpha: expected a number from 0 to 1"),
        (([0, 1], 3), {"alpha": 10**400}, ValueError, "alpha: expected a number from 0 to 1"),
        (([0, 1], 3), {"frequency_power": -1}, ValueError, "frequency_power: .* got -1"),
        (([0, 1], 3), {"singular_power": 3}, ValueError, "singular_power: .* from 0 to 2, got 3"),
        (([0, 1], 3), {"seed": -1}, ValueError, "seed: expected a whole number from 0"),
    ],
)
def test_errors(arguments, options, error, message):
    with pytest.raises(error, match=message):
        word_vectors(*arguments, **options)
