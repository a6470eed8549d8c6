"""Which words trees put together, and how far trees agree about it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hstree.trees import Tree
from hstree.trees.paths import common_depth

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PAIRS = 200_000  # of words, drawn for the correlation of depths


@dataclass(frozen=True)
class Cluster:
    """Classes below one child of the root.

    Attributes:
        size: how many.
        share: of the training text.
        classes: the most frequent ones, in falling order.
    """

    size: int
    share: float
    classes: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """How far the T trees of an ensemble agree; matrices [T, T] are symmetric but for ``together``.

    Attributes:
        adjusted_rand: of the partitions into clusters under the root; 1 for equal ones, 0 expected
            by chance.
        together: share of the pairs of classes in one cluster of the row's tree that are in one
            cluster of the column's tree too.
        chance: [T], share of all pairs of classes that are in one cluster of a tree.
        depth_correlation: Spearman's, over ``pairs`` random pairs of classes, of the depths of
            their lowest common ancestors; nan if one of the trees is flat.
        pairs: their number.
    """

    adjusted_rand: FloatArray
    together: FloatArray
    chance: FloatArray
    depth_correlation: FloatArray
    pairs: int


def root_partition(tree: Tree, frequencies: npt.ArrayLike | None = None) -> IntArray:
    """The cluster of each class, int64 [V]: the child of the root that it is below.

    A binary root, with its two halves, is first collapsed to the sqrt(V) heaviest clusters; see
    :meth:`hstree.trees.Tree.collapse`.

    Args:
        frequencies: real [V], of the training text; None counts leaves.
    """
    if tree.root_width == 2:
        tree = tree.collapse(math.isqrt(tree.n_classes), frequencies=frequencies)
    cluster = np.zeros(tree.n_classes, np.int64)
    if tree.n_nodes:
        first = tree.boundary[: tree.root_width + 1]
        cluster[tree.order] = np.repeat(np.arange(tree.root_width), np.diff(first))
    return cluster


def heaviest_clusters(
    tree: Tree, frequencies: npt.ArrayLike, clusters: int, words: int
) -> tuple[Cluster, ...]:
    """The heaviest clusters of at least two classes under the root, and their heaviest classes.

    Args:
        frequencies: real [V], of the training text, with a positive sum.
        clusters: how many of them at most.
        words: how many classes of each at most.
    """
    weight = np.asarray(frequencies, np.float64)
    cluster = root_partition(tree, weight)
    sizes, mass = np.bincount(cluster), np.bincount(cluster, weight)
    found: list[Cluster] = []
    for c in np.lexsort((np.arange(len(sizes)), -mass)):
        if sizes[c] > 1 and len(found) < clusters:
            of = np.flatnonzero(cluster == c)
            top = of[np.argsort(-weight[of], kind="stable")][:words]
            found.append(Cluster(int(sizes[c]), float(mass[c] / weight.sum()), tuple(top.tolist())))
    return tuple(found)


def nearest_classes(
    tree: Tree, class_id: int, frequencies: npt.ArrayLike, words: int
) -> tuple[tuple[int, int], ...]:
    """Siblings of a class first, then cousins: pairs (class, depth of the lowest common ancestor).

    Deepest first, and the most frequent first among those of equal depth; without the classes that
    part from it at the root, so that a class right under the root has none.

    Args:
        frequencies: real [V], of the training text.
        words: how many at most.
    """
    every = np.arange(tree.n_classes)
    depth = common_depth(tree, np.full(tree.n_classes, class_id), every)
    depth[class_id] = 0
    order = np.lexsort((every, -np.asarray(frequencies, np.float64), -depth))[:words]
    return tuple((int(c), int(depth[c])) for c in order if depth[c] > 0)


def adjusted_rand_index(first: npt.ArrayLike, second: npt.ArrayLike) -> float:
    r"""Agreement of two partitions, corrected for chance.

    .. math::
        \frac{\sum_{ij} \binom{n_{ij}}{2} - E}{\frac{1}{2} (A + B) - E}, \qquad
        A = \sum_i \binom{a_i}{2}, \quad B = \sum_j \binom{b_j}{2}, \quad E = A B / \binom{n}{2}

    with the contingency table n_ij and its row and column sums a, b. 1 for equal partitions, those
    of single elements or of one cluster included.

    Args:
        first, second: int [n], the cluster of each element, from 0 on.

    Raises:
        ValueError: partitions of different sets.

    Source: Hubert and Arabie, Comparing partitions, Journal of Classification 2, 1985.
    """
    both, a, b, every = _pairs(first, second)
    expected = a * b / every if every else 0.0
    largest = (a + b) / 2
    return (both - expected) / (largest - expected) if largest != expected else 1.0


def _pairs(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float, float, float]:
    """Pairs of elements that are together in both partitions, in each, and all pairs."""
    x, y = np.asarray(first, np.int64), np.asarray(second, np.int64)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"second: expected shape {x.shape} as first has, got {y.shape}")
    cells = np.unique(x * (int(y.max(initial=0)) + 1) + y, return_counts=True)[1]
    together = [float((n * (n - 1) // 2).sum()) for n in (cells, np.bincount(x), np.bincount(y))]
    return together[0], together[1], together[2], len(x) * (len(x) - 1) / 2


def tree_agreement(
    trees: Sequence[Tree],
    frequencies: npt.ArrayLike | None = None,
    *,
    pairs: int = PAIRS,
    seed: int = 0,
) -> Agreement:
    """How far trees over the same V >= 2 classes agree.

    Args:
        trees: T of them.
        frequencies: see :func:`root_partition`.
        pairs: how many pairs of different classes are drawn, each alike, at least 2.
        seed: of the draw.

    Raises:
        ValueError: fewer than two pairs, or trees of different sizes or of a single class.
    """
    if pairs < 2:
        raise ValueError(f"pairs: expected at least 2, got {pairs}")
    sizes = sorted({tree.n_classes for tree in trees})
    if len(sizes) != 1 or sizes[0] < 2:
        raise ValueError(f"trees: expected all over the same two classes or more, got {sizes}")
    from scipy.stats import spearmanr

    (n_classes,) = sizes
    random = np.random.default_rng(seed)
    one = random.integers(n_classes, size=pairs)
    other = (one + random.integers(1, n_classes, size=pairs)) % n_classes
    depths = [common_depth(tree, one, other) for tree in trees]
    partitions = [root_partition(tree, frequencies) for tree in trees]
    shape = (len(trees), len(trees))
    rand, together, correlation = np.ones(shape), np.ones(shape), np.ones(shape)
    chance = np.zeros(len(trees))
    for i, partition in enumerate(partitions):
        _, within, _, every = _pairs(partition, partition)
        chance[i] = within / every
        if np.ptp(depths[i]) == 0:
            correlation[i, :] = correlation[:, i] = math.nan
    for i, j in itertools.permutations(range(len(trees)), 2):
        both, within, _, _ = _pairs(partitions[i], partitions[j])
        together[i, j] = both / within if within else math.nan
        if i < j:
            rand[i, j] = rand[j, i] = adjusted_rand_index(partitions[i], partitions[j])
            if not math.isnan(correlation[i, j]):
                found = float(spearmanr(depths[i], depths[j]).statistic)
                correlation[i, j] = correlation[j, i] = found
    return Agreement(rand, together, chance, correlation, pairs)
