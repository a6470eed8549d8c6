"""Trees for a head: how many, of which shape, from what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from hstree.trees import Tree, build_ensemble

if TYPE_CHECKING:
    from hstree.data.statistics import CorpusStatistics

FLAT_CLASSES = 1024
MANY_CLASSES = 1 << 16


def ensemble_shape(
    n_classes: int,
    n_trees: int | None,
    root: int | None,
    *,
    usual_trees: int = 4,
    usual_root: int = 256,
) -> tuple[int, int]:
    """T and C where they are not given.

    Up to FLAT_CLASSES classes one node over all of them. Beyond that ``usual_trees`` with
    ``usual_root`` children of the root, or the power of two that is at least the square root of V;
    at most V / 4, for trees over few classes that are alike would stay alike.
    """
    flat = n_classes <= FLAT_CLASSES
    if n_trees is None:
        n_trees = 1 if flat else usual_trees
    if root is None and flat and n_trees == 1:
        root = n_classes
    elif root is None:
        square_root = 1 << ((n_classes - 1).bit_length() + 1) // 2
        root = max(1, min(max(usual_root, square_root), n_classes // 4))
    return n_trees, root


def several_trees(
    recipe: str,
    n_classes: int,
    frequencies: npt.ArrayLike | None,
    vectors: Sequence[npt.ArrayLike] | None,
    n_trees: int,
    seed: int,
    root: int,
    leaf: int,
    options: Mapping[str, Any] | None = None,
) -> list[Tree]:
    """:func:`hstree.trees.build_ensemble`, with noise in several clustered trees, so that they
    differ."""
    if options is None:
        options = {"noise": 0.3} if recipe == "cluster" and n_trees > 1 else {}
    return build_ensemble(
        recipe, n_classes, n_trees, frequencies, vectors, seed, root, leaf, **options
    )


def corpus_trees(
    statistics: CorpusStatistics,
    n_classes: int,
    n_trees: int,
    recipe: str,
    seed: int,
    root: int,
    leaf: int,
    contexts: Sequence[str],
    tree_options: Mapping[str, Any] | None,
) -> list[Tree]:
    """Trees from the frequencies and the word vectors of a corpus; arguments as for
    :meth:`hstree.heads.TreeEnsemble.from_corpus`."""
    vectors = None
    if recipe == "cluster":
        n_features = 32 if n_classes > MANY_CLASSES else 100
        vectors = [
            statistics.vectors(context=context, n_features=n_features)
            for context in contexts[:n_trees]
        ]
    counts = statistics.frequencies
    return several_trees(
        recipe, n_classes, counts, vectors, n_trees, seed, root, leaf, tree_options
    )
