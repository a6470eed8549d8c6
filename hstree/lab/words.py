"""Word similarity: whether learned word vectors rank similarities as people do.

    rho = Pearson's correlation of rank(score_i) and rank(cos(v_a(i), v_b(i)))

over the pairs i = (a, b) of a set of human scores whose words both have a vector, with a 95%
interval tanh(artanh(rho) -+ 1.96 sqrt((1 + rho^2 / 2) / (n - 3))). A word is looked up as written,
otherwise in lower case. Other pairs are excluded and counted. Sources: Spearman (1904); Bonett and
Wright (2000); for the sets, Faruqui and Dyer, wordvectors.org (2014); Parthiban et al., AAAI 2021.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.heads.flat import FlatHead
from hstree.lm.cli import Argument
from hstree.lm.model import LanguageModel
from hstree.lm.report import COLOURS, Table, count, decimals, legend, panels, plain
from hstree.lm.run import load_run, run_names

from .report import MARKERS, Measurement, Report, row_table

VECTORS = ("input", "output")
SUFFIXES = (".txt", ".csv", ".tsv", ".tab")

# Parts of speech between the words and the score, as in SimLex-999 and SimVerb-3500.
_PARTS_OF_SPEECH = frozenset({"a", "adj", "adv", "j", "n", "noun", "r", "v", "verb"})
# Part-of-speech suffixes of words, as in the lemma form of MEN: sun-n.
_MARKS = ("-a", "-j", "-n", "-r", "-v")


Pair = tuple[str, str, float]
"""Two words and their human similarity score, on any scale."""


@dataclass(frozen=True)
class Embeddings:
    """Vectors [n, D] of words, the row of each word, and the name of the vectors."""

    name: str
    index: Mapping[str, int]
    vectors: npt.NDArray[np.float32]

    def row(self, word: str) -> int | None:
        """The row of a word as written, otherwise of the word in lower case. None if there is none,
        or if its vector is 0, which has no direction."""
        row = self.index.get(word, self.index.get(word.lower()))
        return None if row is None or not self.vectors[row].any() else row

    def cosine(self, first: str, second: str) -> float:
        """Cosine similarity of two words; nan if one has no :meth:`row`."""
        i, j = self.row(first), self.row(second)
        if i is None or j is None:
            return math.nan
        a, b = self.vectors[[i, j]].astype(np.float64)
        return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def read_similarity_sets(path: str | os.PathLike[str]) -> dict[str, tuple[Pair, ...]]:
    """Read word-similarity sets by name: from a folder, all files that end in .txt, .csv, .tsv or
    .tab, in alphabetical order, or from one file.

    Files are in UTF-8, with one pair on each line: two words, an optional part of speech, the mean
    score, and any other columns, which are ignored. Columns are separated by tabs, otherwise
    semicolons, otherwise commas (with CSV quotes), otherwise other white space. Empty lines, lines
    that begin with #, and a header line without a score are skipped. If every word ends with its
    part of speech (``sun-n``), this suffix is removed. The name of a set is that of its file,
    without extension and the prefix ``EN-``. This reads WS-353, RG-65, MC-30, MTurk-287, MTurk-771,
    MEN, YP-130, VERB-143, RW-STANFORD, SimLex-999 and SimVerb-3500.

    Raises:
        ValueError: the file or folder does not exist, the folder has no such file, or two sets have
            the same name; a file is not UTF-8, has no pairs, or a line is not a pair. The message
            names file and line.
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{place}: no such file or folder")
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{place}: expected files that end in {', '.join(SUFFIXES)}, got none")
    sets: dict[str, tuple[Pair, ...]] = {}
    for file in files:
        name = file.stem.removeprefix("EN-")
        if name in sets:
            raise ValueError(f"{file}: another file of this folder also has a set named {name!r}")
        sets[name] = _read_set(file)
    return sets


def _read_set(file: Path) -> tuple[Pair, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, but byte {error.start} is not") from None
    pairs: list[Pair] = []
    header_may_come = True
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        fields = _fields(line)
        pair = _pair(fields)
        if pair is not None:
            pairs.append(pair)
        elif not (header_may_come and len(fields) > 2):
            raise ValueError(
                f"{file}, line {number}: expected word1 word2 score, got {line[:60]!r}"
            )
        header_may_come = False
    if not pairs:
        raise ValueError(f"{file}: expected lines word1 word2 score, got none")
    if all(len(word) > 2 and word.endswith(_MARKS) for *pair, _ in pairs for word in pair):
        pairs = [(first[:-2], second[:-2], score) for first, second, score in pairs]
    return tuple(pairs)


def _fields(line: str) -> list[str]:
    for separator in "\t;,":
        if separator in line:
            row = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            return [field.strip() for field in row]
    return line.split()


def _pair(fields: list[str]) -> Pair | None:
    """The pair, or None if these fields are not one."""
    has_part = len(fields) > 3 and fields[2].lower() in _PARTS_OF_SPEECH
    try:
        first, second, score = *fields[:2], float(fields[3 if has_part else 2])
    except (IndexError, ValueError):
        return None
    return (first, second, score) if first and second and math.isfinite(score) else None


@dataclass(frozen=True)
class WordSimilarity:
    """The correlation of a model's vectors with one set of human scores: the number of its pairs,
    and of those with a word without a vector, which are excluded; Spearman's rank correlation over
    the others, nan for fewer than two or if all human scores or all similarities are equal; its
    two-sided p-value, from Student's t, nan for fewer than three pairs; and its 95% interval, nan
    for fewer than four and for abs(rho) = 1."""

    set: str
    model: str
    pairs: int
    missing: int
    rho: float
    p_value: float
    low: float
    high: float


def model_embeddings(
    model: LanguageModel, words: Sequence[str], name: str, vectors: str = "input"
) -> Embeddings:
    """The word vectors of a model over these V words, in order of class id: ``"input"``, the word
    embeddings [V, D]; ``"output"``, the rows of W [V, E] of a head with one vector for each class.

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
    """Correlations [S][M] of S sets of human scores by name with cosine similarities of the vectors
    of M models. Each is evaluated on all pairs that it has, or with ``common`` all are on the pairs
    that every model has. Equal values share the mean of their ranks. Raises ValueError if there are
    no sets or no embeddings."""
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
    weighted by the number of pairs; nan if there is no such set."""
    rows = [row for row in found if not any(math.isnan(each.rho) for each in row)]
    if not rows:
        return [math.nan] * len(found[0])
    rho = np.array([[each.rho for each in row] for row in rows])
    used = np.array([[each.pairs - each.missing for each in row] for row in rows])
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
    """95% interval of a Spearman correlation over n pairs; nan for n < 4 and for abs(rho) = 1."""
    if n < 4 or not abs(rho) < 1 - 1e-12:
        return math.nan, math.nan
    half = 1.959964 * math.sqrt((1 + rho**2 / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - half), math.tanh(math.atanh(rho) + half)


def measure(arguments: argparse.Namespace) -> Report:
    sets, embeddings = read_similarity_sets(arguments.benchmarks), []
    places = arguments.directories
    for name, place in zip(run_names(places), places, strict=True):
        run = load_run(place)
        words = run.vocabulary.words
        embeddings.append(model_embeddings(run.model, words, name, arguments.vectors))
    found = word_similarity(sets, embeddings, common=arguments.common)
    rows = [each for row in found for each in row]
    models = [each.name for each in embeddings]
    which = {"input": "input embeddings", "output": "output class vectors"}[arguments.vectors]
    pairs = "that every model has" if arguments.common else "whose words it has"
    weighted = mean_similarity(found, weighted=True)
    return Report(
        "Word similarity",
        [word_similarity_table(found)],
        [
            f"{which}, each model on the pairs {pairs}; "
            "p-values and 95% intervals are in words.csv and words.json"
        ],
        {
            "vectors": arguments.vectors,
            "common": arguments.common,
            "correlations": rows,
            "mean": dict(zip(models, mean_similarity(found), strict=True)),
            "mean_weighted_by_pairs": dict(zip(models, weighted, strict=True)),
        },
        rows,
        {"similarity": word_similarity_picture(found)},
    )


def word_similarity_table(found: Sequence[Sequence[WordSimilarity]]) -> Table:
    """A table with a row for each set, then means over the sets if there are several. It has one
    column of missing pairs if their number is the same for all models."""
    models = [each.model for each in found[0]]
    missing = [[each.missing for each in row] for row in found]
    header = [f"missing in {model}" for model in models]
    if all(len(set(row)) == 1 for row in missing):
        missing, header = [row[:1] for row in missing], ["missing"]
    rho = decimals(3)
    rows = [
        (row[0].set, count(row[0].pairs), *map(count, absent), *(rho(each.rho) for each in row))
        for row, absent in zip(found, missing, strict=True)
    ]
    if len(found) > 1:
        blank = [""] * (1 + len(header))
        rows.append(("mean of the sets", *blank, *map(rho, mean_similarity(found))))
        weighted = mean_similarity(found, weighted=True)
        rows.append(("weighted by pairs", *blank, *map(rho, weighted)))
    title = "Spearman's rho of human scores and cosine similarities of word vectors"
    return row_table(title, ("set", "pairs", *header, *models), rows, None, str)


def word_similarity_picture(found: Sequence[Sequence[WordSimilarity]]) -> Any:
    """Plot a band for each set, with a dot for each model at its rho and a line over its 95%
    confidence interval. ``found``: result of :func:`word_similarity`."""
    from matplotlib.ticker import MultipleLocator

    n_sets, n_models = len(found), len(found[0])
    height = 1.5 + n_sets * max(0.32, 0.09 * n_models + 0.08) + 0.2 * n_models
    figure, axes = panels(7.2, height, grid="x")
    for m, column in enumerate(zip(*found, strict=True)):
        colour = COLOURS[m % len(COLOURS)]
        marker = MARKERS[(m + m // len(COLOURS)) % len(MARKERS)]
        places = [s + (m - (n_models - 1) / 2) * 0.7 / n_models for s in range(n_sets)]
        rhos = [each.rho for each in column]
        axes.plot(rhos, places, marker, color=colour, ms=4.5, label=plain(column[0].model))
        for each, place in zip(column, places, strict=True):
            if not math.isnan(each.low):
                axes.plot([each.low, each.high], [place, place], color=colour, lw=1, alpha=0.6)
    for s in range(0, n_sets, 2):
        axes.axhspan(s - 0.5, s + 0.5, color="0.95", lw=0, zorder=0)
    axes.axvline(0, color="0.4", lw=0.8, zorder=1)
    axes.set_yticks(range(n_sets), [_label(row) for row in found])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MultipleLocator(0.2))
    axes.set(
        ylim=(n_sets - 0.5, -0.5),
        xlabel="Spearman's rank correlation with human scores, with 95% interval",
    )
    legend(figure, loc="upper center", ncols=min(n_models, 4), fontsize=9)
    return figure


def _label(row: Sequence[WordSimilarity]) -> str:
    used = [each.pairs - each.missing for each in row]
    least, most = min(used), max(used)
    pairs = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{plain(row[0].set)} ({pairs} pairs)"


COMMAND = Measurement(
    "words",
    "word vectors against human similarity scores",
    measure,
    (
        Argument(
            "--benchmarks",
            "folder of word-similarity sets (.txt, .csv, .tsv, .tab), or one such file: "
            "lines word1 word2 score, and most variants of that format",
            metavar="PATH",
            required=True,
        ),
        Argument(
            "--vectors",
            "the word embeddings, or the class vectors of the output layer, which trees and "
            "the adaptive softmax do not have",
            "input",
            choices=VECTORS,
        ),
        Argument(
            "--common", "evaluate all models on the pairs that every model has", action="store_true"
        ),
    ),
    runs="+",
)
