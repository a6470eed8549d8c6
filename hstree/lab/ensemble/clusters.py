"""Clusters of words in trees, and the agreement of trees about them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hstree.lm.data import Vocabulary
from hstree.trees import Tree
from hstree.trees.paths import common_depth

from ..words import spearman

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Cluster:
    """The words below one child of the root: their number, their share of the training text, and
    the most frequent ones."""

    size: int
    share: float
    words: tuple[str, ...]


@dataclass(frozen=True)
class Agreement:
    """Agreement of the T trees of an ensemble. Matrices are [T, T] and symmetric, except
    ``together``.

    Attributes:
        adjusted_rand: adjusted Rand index of the partitions into clusters under the root: 1 if
            equal, 0 expected by chance.
        together: of the pairs of classes in one cluster of the row's tree, the share that is also
            in one cluster of the column's tree.
        chance: share of all pairs of classes that are in one cluster of a tree, [T].
        depth_correlation: Spearman's correlation of the depths of the lowest common ancestors of
            ``pairs`` random pairs of classes; nan if one of the trees is flat.
        pairs: number of these pairs.
    """

    adjusted_rand: FloatArray
    together: FloatArray
    chance: FloatArray
    depth_correlation: FloatArray
    pairs: int


def root_partition(tree: Tree, frequencies: npt.ArrayLike | None = None) -> IntArray:
    """The cluster of each class, int64 [V]: the number of the root's child above it. A tree with a
    binary root is first collapsed to the sqrt(V) clusters that are heaviest by the frequencies [V]
    of the classes in the training text (None: equal ones)."""
    if tree.root_width == 2:
        tree = tree.collapse(math.isqrt(tree.n_classes), frequencies=frequencies)
    cluster = np.zeros(tree.n_classes, np.int64)
    if tree.n_nodes:
        first = tree.boundary[: tree.root_width + 1]
        cluster[tree.order] = np.repeat(np.arange(tree.root_width), np.diff(first))
    return cluster


def heaviest_clusters(tree: Tree, vocabulary: Vocabulary, n: int, words: int) -> list[Cluster]:
    """The heaviest clusters of two or more words under the root, at most n, each with its most
    frequent words."""
    weight = vocabulary.frequencies
    cluster = root_partition(tree, weight)
    sizes, mass = np.bincount(cluster), np.bincount(cluster, weight)
    order = np.argsort(-weight, kind="stable")
    return [
        Cluster(
            int(sizes[c]),
            float(mass[c] / mass.sum()),
            tuple(vocabulary.decode(order[cluster[order] == c][:words])),
        )
        for c in [c for c in np.argsort(-mass, kind="stable") if sizes[c] > 1][:n]
    ]


def nearest_words(tree: Tree, vocabulary: Vocabulary, word: str, n: int) -> list[tuple[str, int]]:
    """The nearest words in a tree, at most n: pairs (word, depth of the lowest common ancestor), by
    decreasing depth, then by frequency. Words that part at the root are excluded."""
    own = vocabulary[word]
    depth = common_depth(tree, np.full(tree.n_classes, own), np.arange(tree.n_classes))
    depth[own] = 0
    order = np.lexsort((-vocabulary.frequencies, -depth))[:n]
    return [(vocabulary.words[c], int(depth[c])) for c in order if depth[c] > 0]


def adjusted_rand_index(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    r"""Agreement of two partitions, corrected for chance.

    .. math::
        \frac{\sum_{ij} \binom{n_{ij}}{2} - E}{\frac{1}{2} (A + B) - E}, \qquad
        A = \sum_i \binom{a_i}{2}, \quad B = \sum_j \binom{b_j}{2}, \quad E = A B / \binom{n}{2}

    with the contingency table n_ij and its row and column sums a, b. ``first`` and ``second``:
    cluster of each element, from 0 on, int [n]. 1 for equal partitions, including those into single
    elements or one cluster. Raises ValueError for partitions of different sizes.

    Source: Hubert and Arabie, Comparing partitions, Journal of Classification 2, 1985.
    """
    x, y = np.asarray(first, np.int64), np.asarray(second, np.int64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"second: expected shape {x.shape} as first has, got {y.shape}")
    a, b, every = _pairs(x, x), _pairs(y, y), math.comb(len(x), 2)
    expected = a * b / every if every else 0.0
    largest = (a + b) / 2
    return (_pairs(x, y) - expected) / (largest - expected) if largest != expected else 1.0


def _pairs(x: IntArray, y: IntArray) -> int:
    """Number of pairs of elements that are together in both partitions."""
    counts = np.unique(x * (y.max(initial=0) + 1) + y, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def tree_agreement(
    trees: Sequence[Tree],
    frequencies: npt.ArrayLike | None = None,
    *,
    pairs: int = 200_000,
    seed: int = 0,
) -> Agreement:
    """Compute the agreement of trees over the same V >= 2 classes.

    Args:
        trees: the T trees.
        frequencies: see ``root_partition``.
        pairs: number of pairs of different classes to draw uniformly, at least 2.
        seed: seed of the draw.

    Raises:
        ValueError: there are fewer than two pairs, or the trees have different sizes or a single
            class.
    """
    if pairs < 2:
        raise ValueError(f"pairs: expected at least 2, got {pairs}")
    sizes = sorted({tree.n_classes for tree in trees})
    if len(sizes) != 1 or sizes[0] < 2:
        raise ValueError(f"trees: expected all over the same two classes or more, got {sizes}")
    (n_classes,) = sizes
    random = np.random.default_rng(seed)
    one = random.integers(n_classes, size=pairs)
    other = (one + random.integers(1, n_classes, size=pairs)) % n_classes
    depths = [common_depth(tree, one, other) for tree in trees]
    partitions = [root_partition(tree, frequencies) for tree in trees]
    within = [_pairs(partition, partition) for partition in partitions]
    rand, together = np.ones((2, len(trees), len(trees)))
    correlation = np.diag([math.nan if np.ptp(depth) == 0 else 1.0 for depth in depths])
    for i, j in itertools.combinations(range(len(trees)), 2):
        rand[i, j] = rand[j, i] = adjusted_rand_index(partitions[i], partitions[j])
        both = _pairs(partitions[i], partitions[j])
        together[i, j] = both / within[i] if within[i] else math.nan
        together[j, i] = both / within[j] if within[j] else math.nan
        correlation[i, j] = correlation[j, i] = spearman(depths[i], depths[j])[0]
    chance = np.array(within) / math.comb(n_classes, 2)
    return Agreement(rand, together, chance, correlation, pairs)
