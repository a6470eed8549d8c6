"""Number, shape and recipe of the trees of a head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from hstree.trees import Tree, build_ensemble

if TYPE_CHECKING:
    from hstree.lm.data.statistics import CorpusStatistics

FLAT_CLASSES = 1024
TWO_LEVEL_CLASSES = 1 << 14
MANY_CLASSES = 1 << 16
GROUP = 16


def ensemble_shape(
    n_classes: int,
    n_trees: int | None,
    root: int | None,
    *,
    usual_trees: int = 4,
    usual_root: int = 256,
) -> tuple[int, int]:
    """Number of trees T and width of the root C, with defaults for None.

    Up to FLAT_CLASSES classes the default is one node over all classes. Beyond that it is
    ``usual_trees`` trees. Their root has ``usual_root`` children or, if that is more, the smallest
    power of two that is at least the square root of V. It has at most V / 4 children, because trees
    with too wide a root would hardly differ.
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


def shape_below(
    n_classes: int, root: int, leaf: int | None, levels: int | None, sparse: bool = False
) -> tuple[int, int | None]:
    """Size of the leaf groups G and number of levels of trees with a root of this width, with
    defaults for None: binary nodes if ``leaf`` is given or the root is binary, otherwise two
    levels.

    With row-sparse gradients and more than TWO_LEVEL_CLASSES classes, binary nodes over groups of
    GROUP: below two levels, a batch reaches almost all rows of the output embedding, because
    clusters of rare classes are large.
    """
    if leaf is None and levels is None and root > 2:
        if sparse and n_classes > TWO_LEVEL_CLASSES:
            leaf = GROUP
        else:
            levels = 2
    if leaf is None:
        leaf = GROUP if levels == 3 else 1
    return leaf, levels


def usual_vectors(
    n_classes: int, root: int, leaf: int, levels: int | None, tied: bool = False
) -> str:
    """The default of ``node_vectors``: trees whose leaves are groups share the output embedding of
    their classes, unless the root has all classes as its children and nothing is tied."""
    grouped = (levels is not None or leaf > 1) and root < n_classes
    return "leaves" if tied or grouped else "free"


def several_trees(
    recipe: str,
    n_classes: int,
    frequencies: npt.ArrayLike | None,
    vectors: Sequence[npt.ArrayLike] | None,
    n_trees: int,
    seed: int,
    root: int,
    leaf: int,
    levels: int | None,
    options: Mapping[str, Any] | None = None,
) -> list[Tree]:
    """:func:`hstree.trees.build_ensemble`; several clustered trees get noise by default, so that
    they differ."""
    if options is None:
        options = {"noise": 0.3} if recipe == "cluster" and n_trees > 1 else {}
    return build_ensemble(
        recipe, n_classes, n_trees, frequencies, vectors, seed, root, leaf, levels, **options
    )


def corpus_trees(
    statistics: CorpusStatistics,
    n_classes: int,
    n_trees: int,
    recipe: str,
    seed: int,
    root: int,
    leaf: int,
    levels: int | None,
    contexts: Sequence[str],
    tree_options: Mapping[str, Any] | None,
) -> list[Tree]:
    """Trees from the frequencies and word vectors of a corpus; arguments of
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
        recipe, n_classes, counts, vectors, n_trees, seed, root, leaf, levels, tree_options
    )
