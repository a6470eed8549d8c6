"""Trees for a training corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hstree.trees import Tree, build_ensemble

if TYPE_CHECKING:
    from hstree.data.statistics import CorpusStatistics


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
        vectors = [statistics.vectors(context=context) for context in contexts[:n_trees]]
        if tree_options is None and n_trees > 1:
            tree_options = {"noise": 0.3}  # so that they differ
    return build_ensemble(
        recipe,
        n_classes,
        n_trees,
        statistics.frequencies,
        vectors,
        seed,
        root,
        leaf,
        **(tree_options or {}),
    )
