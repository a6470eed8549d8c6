"""Word similarity: do vectors that a model has learned order pairs of words as people do?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.heads.flat import FlatHead
from hstree.models import LanguageModel

from .table import Table, count, decimals, table
from .word_files import Embeddings, SimilaritySet

VECTORS = ("input", "output")


@dataclass(frozen=True)
class RankCorrelation:
    """Vectors against one set.

    Attributes:
        pairs: of the set.
        missing: those with a word that has no vector; they do not count.
        rho: Spearman's rank correlation over the others; nan below two pairs, or where all human
            scores or all similarities are equal.
        p_value: two-sided, of rho = 0, from Student's t; nan below three pairs.
        low, high: 95% confidence interval of rho; nan below four pairs and for abs(rho) = 1.
    """

    pairs: int
    missing: int
    rho: float
    p_value: float
    low: float
    high: float

    @property
    def used(self) -> int:
        """Number of pairs that count."""
        return self.pairs - self.missing


@dataclass(frozen=True)
class WordSimilarity:
    """What :func:`word_similarity` returns.

    Attributes:
        sets: names of the S sets.
        models: names of the M embeddings.
        correlations: [S][M].
    """

    sets: tuple[str, ...]
    models: tuple[str, ...]
    correlations: tuple[tuple[RankCorrelation, ...], ...]

    def mean(self, *, weighted: bool = False) -> tuple[float, ...]:
        """Mean rho of each of the M embeddings over the sets where all of them have one, weighted
        or not by the number of pairs that count; nan if there is no such set."""
        rows = [row for row in self.correlations if not any(math.isnan(c.rho) for c in row)]
        means = []
        for column in zip(*rows, strict=True) if rows else [()] * len(self.models):
            weights = [c.used if weighted else 1 for c in column]
            total = sum(w * c.rho for w, c in zip(weights, column, strict=True))
            means.append(total / sum(weights) if column else math.nan)
        return tuple(means)


def model_embeddings(
    model: LanguageModel, words: Sequence[str], name: str, vectors: str = "input"
) -> Embeddings:
    """Word vectors of a language model.

    Args:
        model: of V classes.
        words: the V words in order of class id.
        name: what to call them.
        vectors: ``"input"``, the word embeddings [V, D]; ``"output"``, the rows of W [V, E] of a
            head with one vector for each class. The two are the same tensor in a tied model.

    Raises:
        ValueError: another kind, a head without such vectors, a number of words other than V, or
            vectors that are not finite.
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
    return Embeddings(name, dict(zip(words, range(len(words)), strict=True)), values)


def word_similarity(
    sets: Sequence[SimilaritySet], embeddings: Sequence[Embeddings], *, common: bool = False
) -> WordSimilarity:
    """Spearman's correlation between human scores and cosine similarities of word vectors.

        rho = Pearson's correlation of rank(score_i) and rank(cos(v_a(i), v_b(i)))

    over the pairs i = (a, b) whose words both have a vector (:meth:`Embeddings.row`); equal values
    share the mean of their ranks.

    Args:
        sets: human scores.
        embeddings: vectors; each of them is judged on all pairs that it has.
        common: judge all of them on the pairs that every one has.

    Raises:
        ValueError: no set or no embeddings.

    Sources: Spearman (1904); for the sets and the custom of counting what is missing, Faruqui and
    Dyer, *Community Evaluation and Exchange of Word Vectors at wordvectors.org* (2014).
    """
    for name, values in (("sets", sets), ("embeddings", embeddings)):
        if not values:
            raise ValueError(f"{name}: expected at least one, got none")
    rows = []
    for judged in sets:
        known = [_known(judged, each) for each in embeddings]
        if common:
            known = [np.logical_and.reduce(known)] * len(embeddings)
        rows.append(
            tuple(
                _correlate(judged, each, mask) for each, mask in zip(embeddings, known, strict=True)
            )
        )
    return WordSimilarity(
        tuple(each.name for each in sets), tuple(each.name for each in embeddings), tuple(rows)
    )


def _known(judged: SimilaritySet, embeddings: Embeddings) -> npt.NDArray[np.bool_]:
    known = [all(embeddings.row(word) is not None for word in pair) for pair in judged.pairs]
    return np.array(known, dtype=np.bool_)


def _correlate(
    judged: SimilaritySet, embeddings: Embeddings, mask: npt.NDArray[np.bool_]
) -> RankCorrelation:
    pairs = [pair for pair, use in zip(judged.pairs, mask, strict=True) if use]
    scores = np.array(judged.scores)[mask]
    rho, p_value = spearman(scores, _cosines(embeddings, pairs))
    low, high = confidence_interval(rho, len(pairs))
    missing = len(judged.pairs) - len(pairs)
    return RankCorrelation(len(judged.pairs), missing, rho, p_value, low, high)


def _cosines(embeddings: Embeddings, pairs: Sequence[tuple[str, str]]) -> npt.NDArray[np.float64]:
    rows = np.array([[embeddings.row(word) for word in pair] for pair in pairs], dtype=np.int64)
    first, second = embeddings.vectors[rows.reshape(-1, 2).T].astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines: npt.NDArray[np.float64] = (first * second).sum(1) / norms
    return cosines


def spearman(first: npt.ArrayLike, second: npt.ArrayLike) -> tuple[float, float]:
    """Spearman's rank correlation of two series and its two-sided p-value, by
    :func:`scipy.stats.spearmanr`; nan where they are not defined: for fewer than two values or
    values that are all equal, and p for fewer than three."""
    from scipy.stats import spearmanr

    series = [np.asarray(values, np.float64) for values in (first, second)]
    if any(len(np.unique(values)) < 2 for values in series):
        return math.nan, math.nan
    result = spearmanr(*series)
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


def word_similarity_table(result: WordSimilarity) -> Table:
    """A row for each set, then means over the sets if there are several. Missing pairs are counted
    once if they are as many for all models."""
    several = len(result.sets) > 1
    means = [("mean of the sets", result.mean()), ("weighted by pairs", result.mean(weighted=True))]
    blank = [""] * (len(means) if several else 0)
    first = [row[0] for row in result.correlations]
    names = [*result.sets, *([name for name, _ in means] if several else [])]
    columns: list[tuple[str, bool, list[str]]] = [
        ("set", False, names),
        ("pairs", True, [count(c.pairs) for c in first] + blank),
    ]
    missing = [[row[m].missing for row in result.correlations] for m in range(len(result.models))]
    if all(column == missing[0] for column in missing):
        columns.append(("missing", True, [count(value) for value in missing[0]] + blank))
    else:
        for name, values in zip(result.models, missing, strict=True):
            columns.append((f"missing in {name}", True, [count(v) for v in values] + blank))
    for m, name in enumerate(result.models):
        cells = [decimals(row[m].rho, 3) for row in result.correlations]
        columns.append((name, True, cells + ([decimals(v[m], 3) for _, v in means] * several)))
    return table("Spearman's rho of human scores and cosine similarities of word vectors", columns)


def word_similarity_rows(result: WordSimilarity) -> list[dict[str, Any]]:
    """One for each set and model, in full digits."""
    return [
        {
            "set": name,
            "model": model,
            "pairs": c.pairs,
            "missing": c.missing,
            "rho": c.rho,
            "p_value": c.p_value,
            "low": c.low,
            "high": c.high,
        }
        for name, row in zip(result.sets, result.correlations, strict=True)
        for model, c in zip(result.models, row, strict=True)
    ]
