"""Recipes for trees: random, Huffman and clustered. Each is seeded and gives the same tree on every
machine.

``hstree._host`` builds the trees with integer random numbers, sums in a fixed order and sorts by a
total order: a tree depends on the arguments alone. (Word vectors from an SVD may differ in the last
bits between linear-algebra libraries.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import closing
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree._checks import check_frequencies, check_int, check_seed
from hstree._progress import Task, track
from hstree.trees.tables import MAX_CLASSES, MAX_DEPTH
from hstree.trees.tree import Tree


def random_tree(
    n_classes: int,
    seed: int = 0,
    *,
    clusters: int | None = None,
    binary: bool = False,
    frequencies: npt.ArrayLike | None = None,
) -> Tree:
    """A balanced binary tree over a uniform random permutation of the classes.

    Every inner node splits n leaves into ceil(n / 2) and floor(n / 2), so the depth is at most
    ceil(log2 V).

    Args:
        n_classes: number of classes, V >= 1.
        seed: seed, 0 to 2^64 - 1.
        clusters: number of children of the root, C of :meth:`Tree.collapse`; None: the tree is
            binary throughout.
        binary: whether the nodes below the clusters are binary; otherwise a cluster is one group.
        frequencies: class frequencies, real [V], for :meth:`Tree.collapse` only.

    Raises:
        TypeError: if the frequencies are not real numbers.
        ValueError: for a value out of range.

    Example:
        >>> import hstree
        >>> hstree.trees.random_tree(8, seed=0).depth.tolist()
        [3, 3, 3, 3, 3, 3, 3, 3]
    """
    n_classes = check_int("n_classes", n_classes, 1, MAX_CLASSES)
    weight = None if frequencies is None else check_frequencies(frequencies, n_classes)
    tree = Tree._adopt(_host.random_tree(n_classes, check_seed(seed)))
    return _collapsed(tree, clusters, binary, weight)


def huffman_tree(
    frequencies: npt.ArrayLike,
    seed: int = 0,
    *,
    clusters: int | None = None,
    binary: bool = False,
) -> Tree:
    """The Huffman tree, which minimizes sum_c f_c depth_c among all binary trees.

    Frequencies below 2^-32 of their sum count as that much. This bounds the depth by 46 for any V
    up to 2^30. The order of classes and nodes of equal frequency is random, and so are left and
    right.

    Args:
        frequencies: class frequencies, real [V], finite, none negative; all zero counts as all
            equal.
        seed: seed, 0 to 2^64 - 1.
        clusters: number of children of the root, C of :meth:`Tree.collapse`; None: the tree is
            binary throughout.
        binary: whether the nodes below the clusters are binary; otherwise a cluster is one group.

    Raises:
        TypeError: if the frequencies are not real numbers.
        ValueError: for a value out of range.

    Example:
        >>> import hstree
        >>> hstree.trees.huffman_tree([8, 4, 2, 1]).depth.tolist()
        [1, 2, 3, 3]

    Source: Huffman, A method for the construction of minimum-redundancy codes, 1952.
    """
    weight = check_frequencies(frequencies)
    tree = Tree._adopt(_host.huffman_tree(weight, check_seed(seed)))
    return _collapsed(tree, clusters, binary, weight)


def cluster_tree(
    vectors: npt.ArrayLike,
    frequencies: npt.ArrayLike | None = None,
    seed: int = 0,
    *,
    clusters: int | None = None,
    binary: bool = False,
    noise: float = 0.0,
    iterations: int = 8,
    max_depth: int = MAX_DEPTH,
) -> Tree:
    """A tree that splits class vectors recursively by balanced 2-means.

    At each node the axis starts as the difference of two random vectors. Then three steps repeat
    until nothing changes. The classes are sorted by their projection on the axis, which is the
    order of the difference of their distances to the two centroids. They are cut where both halves
    have the same weight. The axis becomes the difference of the centroids of the halves. The weight
    of a class, in the cut and in the centroids, is its frequency. A class with half of a node's
    mass forms a half on its own. Near ``max_depth`` the cuts move towards equal counts, so that all
    classes fit.

    Args:
        vectors: class vectors, real [V, F], finite.
        frequencies: class frequencies, real [V], finite, none negative; None or all zero counts as
            all equal.
        seed: seed, 0 to 2^64 - 1.
        clusters: number of children of the root, C of :meth:`Tree.collapse`; None: the tree is
            binary throughout.
        binary: whether the nodes below the clusters are binary; otherwise a cluster is one group.
        noise: standard deviation of noise that is added to the vectors once, relative to the root
            mean square of their entries, so that trees of different seeds differ.
        iterations: largest number of iterations of 2-means at a node, at least 1.
        max_depth: largest number of inner nodes on a path before collapsing, ceil(log2 V) to
            MAX_DEPTH.

    Raises:
        TypeError: if the vectors or frequencies are not real numbers.
        ValueError: for a wrong shape, a number that is not finite, or an option out of range.

    Example:
        >>> import hstree
        >>> tree = hstree.trees.cluster_tree([[0.0], [5.0], [0.1], [5.1]])
        >>> sorted(sorted(pair) for pair in tree.to_nested())
        [[0, 2], [1, 3]]
    """
    points = np.asarray(vectors)
    if points.dtype.kind not in "iuf":
        raise TypeError(f"vectors: expected real numbers, got dtype {points.dtype}")
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"vectors: expected shape [V, F] with V, F >= 1, got {points.shape}")
    with np.errstate(over="ignore"):
        points = np.ascontiguousarray(points, dtype=np.float32)
    finite = np.isfinite(points).all(axis=1)
    if not finite.all():
        i = int(finite.argmin())
        raise ValueError(f"vectors[{i}]: expected finite float32 numbers, got {points[i]}")
    n_classes = check_int("n_classes", points.shape[0], 1, MAX_CLASSES)
    weight = None if frequencies is None else check_frequencies(frequencies, n_classes)
    noise = float(noise)
    if not 0 <= noise < np.inf:
        raise ValueError(f"noise: expected a finite number of at least 0, got {noise!r}")
    arguments = (
        points,
        weight,
        check_seed(seed),
        noise,
        check_int("iterations", iterations, 1, 2**31),
        check_int("max_depth", max_depth, (n_classes - 1).bit_length(), MAX_DEPTH),
    )
    with closing(Task("building a tree", 1)):
        tree = Tree._adopt(_host.cluster_tree(*arguments))
    return _collapsed(tree, clusters, binary, weight)


def _collapsed(
    tree: Tree, clusters: int | None, binary: bool, weight: npt.NDArray[np.float64] | None
) -> Tree:
    if clusters is None:
        return tree
    return tree.collapse(clusters, binary=binary, frequencies=weight)


def _build_random(n_classes: int, frequencies: Any, vectors: Any, seed: int, **shape: Any) -> Tree:
    return random_tree(n_classes, seed, frequencies=frequencies, **shape)


def _build_huffman(n_classes: int, frequencies: Any, vectors: Any, seed: int, **shape: Any) -> Tree:
    if frequencies is None:
        raise ValueError("frequencies: expected an array for the recipe 'huffman', got None")
    return huffman_tree(frequencies, seed, **shape)


def _build_cluster(
    n_classes: int, frequencies: Any, vectors: Any, seed: int, **options: Any
) -> Tree:
    if vectors is None:
        raise ValueError("vectors: expected an array for the recipe 'cluster', got None")
    if np.ndim(vectors) != 2 or len(vectors) != n_classes:
        raise ValueError(f"vectors: expected shape ({n_classes}, F), got {np.shape(vectors)}")
    return cluster_tree(vectors, frequencies, seed, **options)


RECIPES: MappingProxyType[str, Callable[..., Tree]] = MappingProxyType(
    {
        "random": _build_random,
        "huffman": _build_huffman,
        "cluster": _build_cluster,
    }
)
"""The recipes of :func:`build_tree` by name."""

_SHAPE = ("clusters", "binary")
_CLUSTER_OPTIONS = tuple(
    name
    for name, parameter in inspect.signature(cluster_tree).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in _SHAPE
)
_OPTIONS = {"cluster": _CLUSTER_OPTIONS}


def recipe_names() -> list[str]:
    """Names of the recipes of :func:`build_tree`.

    Example:
        >>> import hstree
        >>> {"random", "huffman", "cluster"} <= set(hstree.trees.recipe_names())
        True
    """
    return list(RECIPES)


def build_tree(
    recipe: str,
    n_classes: int,
    frequencies: npt.ArrayLike | None = None,
    vectors: npt.ArrayLike | None = None,
    seed: int = 0,
    clusters: int | None = None,
    binary: bool = False,
    **options: Any,
) -> Tree:
    """Build a tree by the name of its recipe.

    Args:
        recipe: ``"random"``, ``"huffman"`` (requires ``frequencies``) or ``"cluster"`` (requires
            ``vectors``).
        n_classes: number of classes, V >= 1.
        frequencies: class frequencies, real [V], finite, none negative.
        vectors: class vectors, real [V, F].
        seed: seed, 0 to 2^64 - 1.
        clusters: number of children of the root, C of :meth:`Tree.collapse`; None: the tree is
            binary throughout.
        binary: whether the nodes below the clusters are binary; otherwise a cluster is one group.
        **options: further arguments of :func:`cluster_tree`.

    Raises:
        TypeError: for an option that the recipe does not have.
        ValueError: for an unknown recipe, missing frequencies or vectors, or a value out of range.

    Example:
        >>> from hstree.trees import build_tree
        >>> build_tree("huffman", 4, frequencies=[8, 4, 2, 1]).depth.tolist()
        [1, 2, 3, 3]
    """
    if recipe not in RECIPES:
        raise ValueError(f"recipe: expected one of {recipe_names()}, got {recipe!r}")
    unknown = sorted(set(options) - set(_OPTIONS.get(recipe, ())))
    if unknown:
        known = ", ".join(_OPTIONS.get(recipe, ())) or "none"
        raise TypeError(f"{unknown[0]}: the recipe {recipe!r} has no such option (it has: {known})")
    n_classes = check_int("n_classes", n_classes, 1, MAX_CLASSES)
    if frequencies is not None:
        frequencies = check_frequencies(frequencies, n_classes)
    options |= {"clusters": clusters, "binary": binary}
    return RECIPES[recipe](n_classes, frequencies, vectors, seed, **options)


def tree_seed(seed: int, index: int) -> int:
    """The seed of tree ``index`` of an ensemble: output ``index`` of SplitMix64 started at
    ``seed``. No two trees of an ensemble have the same seed.

    Args:
        seed: seed of the ensemble, 0 to 2^64 - 1.
        index: number of the tree, at least 0.

    Example:
        >>> import hstree
        >>> hstree.trees.tree_seed(0, 0), hstree.trees.tree_seed(0, 1)
        (16294208416658607535, 7960286522194355700)
    """
    state = (check_seed(seed) + 0x9E3779B97F4A7C15 * (check_int("index", index, 0) + 1)) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def build_ensemble(
    recipe: str,
    n_classes: int,
    n_trees: int,
    frequencies: npt.ArrayLike | None = None,
    vectors: npt.ArrayLike | Sequence[npt.ArrayLike] | None = None,
    seed: int = 0,
    clusters: int | None = None,
    binary: bool = False,
    **options: Any,
) -> list[Tree]:
    """Build several trees by one recipe; tree t has the seed ``tree_seed(seed, t)``.

    Args:
        recipe: as in :func:`build_tree`.
        n_classes: number of classes, V >= 1.
        n_trees: number of trees, T >= 1.
        frequencies: as in :func:`build_tree`.
        vectors: class vectors, real [V, F], for all trees, or a list of such arrays, which the
            trees use cyclically.
        seed: seed, 0 to 2^64 - 1.
        clusters, binary: as in :func:`build_tree`.
        **options: further arguments of :func:`cluster_tree`. Several clustered trees have
            ``noise=0.3`` unless it is given, so that they differ.

    Raises:
        TypeError: as in :func:`build_tree`.
        ValueError: as in :func:`build_tree`.

    Example:
        >>> import hstree
        >>> trees = hstree.trees.build_ensemble("random", 1000, 3, clusters=16)
        >>> [tree.root_width for tree in trees]
        [16, 16, 16]
    """
    n_trees = check_int("n_trees", n_trees, 1)
    if recipe == "cluster" and n_trees > 1:
        options.setdefault("noise", 0.3)
    choices: list[Any] = [vectors]
    if isinstance(vectors, (list, tuple)) and len(vectors) and np.ndim(vectors[0]) == 2:
        choices = list(vectors)
    with closing(track(range(n_trees), "building trees", n_trees)) as numbers:
        return [
            build_tree(
                recipe,
                n_classes,
                frequencies,
                choices[t % len(choices)],
                tree_seed(seed, t),
                clusters,
                binary,
                **options,
            )
            for t in numbers
        ]
