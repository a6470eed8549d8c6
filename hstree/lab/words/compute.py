"""Word similarity: correlation of learned word vectors with human judgments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hstree.heads.flat import FlatHead
from hstree.lm.models import LanguageModel

from .files import Embeddings, Pair

VECTORS = ("input", "output")


@dataclass(frozen=True)
class WordSimilarity:
    """The correlation of a model's vectors with one set of human scores.

    Attributes:
        set, model: names of the set and the model.
        pairs: number of pairs of the set.
        missing: number of pairs with a word without a vector; they are excluded.
        rho: Spearman's rank correlation over the other pairs; nan for fewer than two pairs, or if
            all human scores or all similarities are equal.
        p_value: two-sided p-value of rho = 0, from Student's t; nan for fewer than three pairs.
        low, high: 95% confidence interval of rho; nan for fewer than four pairs and for abs(rho) =
            1.
    """

    set: str
    model: str
    pairs: int
    missing: int
    rho: float
    p_value: float
    low: float
    high: float

    @property
    def used(self) -> int:
        """The number of pairs that are not missing."""
        return self.pairs - self.missing


def model_embeddings(
    model: LanguageModel, words: Sequence[str], name: str, vectors: str = "input"
) -> Embeddings:
    """Get the word vectors of a language model.

    Args:
        model: language model over V classes.
        words: the V words in order of class id.
        name: name of the vectors.
        vectors: ``"input"``, the word embeddings [V, D]; ``"output"``, the rows of W [V, E] of a
            head with one vector for each class. The two are the same tensor in a tied model.

    Raises:
        ValueError: the kind of vectors is unknown, the head has no such vectors, the number of
            words is not V, or vectors are not finite.
    """
    if vectors not in VECTORS:
        raise ValueError(f"vectors: expected one of {', '.join(VECTORS)}, got {vectors!r}")
    if len(words) != model.head.n_classes:
        raise ValueError(f"words: expected {model.head.n_classes} (V), got {len(words)}")
    weight = model.backbone.embedding.weight
    if vectors == "output":
        if not isinstance(model.head, FlatHead):
            raise ValueError(
                f"vectors: expected 'input' for {name}, since its head {model.head.name!r} has no "
                "vector for each class, got 'output'"
            )
        weight = model.head.weight
    values: npt.NDArray[np.float32] = weight.detach().float().cpu().numpy()
    if not np.isfinite(values).all():
        raise ValueError(f"model: the {vectors} vectors of {name} are not all finite")
    return Embeddings(name, {word: row for row, word in enumerate(words)}, values)


def word_similarity(
    sets: Mapping[str, Sequence[Pair]], embeddings: Sequence[Embeddings], *, common: bool = False
) -> list[list[WordSimilarity]]:
    """Compute Spearman's correlation between human scores and cosine similarities of word vectors.

        rho = Pearson's correlation of rank(score_i) and rank(cos(v_a(i), v_b(i)))

    over the pairs i = (a, b) whose words both have a vector (``Embeddings.row``). Equal values
    share the mean of their ranks.

    Args:
        sets: S sets of human scores by name.
        embeddings: vectors of M models; each is evaluated on all pairs that it has.
        common: whether to evaluate all models on the pairs that every model has.

    Returns:
        The correlations, [S][M].

    Raises:
        ValueError: there are no sets or no embeddings.

    Sources: Spearman (1904); for the sets and the custom of counting missing pairs, Faruqui and
    Dyer, *Community Evaluation and Exchange of Word Vectors at wordvectors.org* (2014).
    """
    for argument, given in (("sets", sets), ("embeddings", embeddings)):
        if not given:
            raise ValueError(f"{argument}: expected at least one, got none")
    found = []
    for name, pairs in sets.items():
        scores = np.array([score for *_, score in pairs])
        cosines = np.array([[of.cosine(a, b) for a, b, _ in pairs] for of in embeddings])
        used = ~np.isnan(cosines)
        if common:
            used[:] = used.all(axis=0)
        row = []
        for of, values, use in zip(embeddings, cosines, used, strict=True):
            rho, p_value = spearman(scores[use], values[use])
            n = int(use.sum())
            low, high = confidence_interval(rho, n)
            missing = len(pairs) - n
            row.append(WordSimilarity(name, of.name, len(pairs), missing, rho, p_value, low, high))
        found.append(row)
    return found


def mean_similarity(
    found: Sequence[Sequence[WordSimilarity]], *, weighted: bool = False
) -> list[float]:
    """The mean rho of each of the M models over the sets on which all models have one, optionally
    weighted by the number of pairs; nan if there is no such set. ``found``: result of
    :func:`word_similarity`."""
    rows = [row for row in found if not any(math.isnan(each.rho) for each in row)]
    if not rows:
        return [math.nan] * len(found[0])
    rho = np.array([[each.rho for each in row] for row in rows])
    used = np.array([[each.used for each in row] for row in rows])
    mean: list[float] = np.average(rho, axis=0, weights=used if weighted else None).tolist()
    return mean


def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Spearman's rank correlation of two series and its two-sided p-value. Both are nan for fewer
    than two values or equal values, and the p-value also for two values."""
    from scipy.stats import spearmanr

    if any(len(np.unique(values)) < 2 for values in (first, second)):
        return math.nan, math.nan
    result = spearmanr(first, second)
    return float(result.statistic), float(result.pvalue)


def confidence_interval(rho: float, n: int) -> tuple[float, float]:
    """95% confidence interval of a Spearman correlation over n pairs.

        tanh(artanh(rho) +- 1.96 sqrt((1 + rho^2 / 2) / (n - 3)))

    nan for n < 4 and for abs(rho) = 1. Source: Bonett and Wright, *Sample size requirements for
    estimating Pearson, Kendall and Spearman correlations* (2000).
    """
    if n < 4 or not abs(rho) < 1 - 1e-12:
        return math.nan, math.nan
    half = 1.959964 * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)
