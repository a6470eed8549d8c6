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

from hstree.lm.cli import Argument
from hstree.lm.model import LanguageModel
from hstree.lm.report import Table, count, decimals, legend, line_style, panels, plain

from .report import Measurement, Report, load_runs, row_table

SUFFIXES = (".txt", ".csv", ".tsv", ".tab")

# Parts of speech between the words and the score, as in SimLex-999 and SimVerb-3500.
_PARTS_OF_SPEECH = frozenset({"a", "adj", "adv", "j", "n", "noun", "r", "v", "verb"})
# Part-of-speech suffixes of words, as in the lemma form of MEN: sun-n.
_MARKS = ("-a", "-j", "-n", "-r", "-v")


Pair = tuple[str, str, float]
"""Two words and their human similarity score, on any scale."""
Similarities = list[dict[str, Any]]


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
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{place}: no such file or folder")
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{place}: expected files that end in {', '.join(SUFFIXES)}, got none")
    return {file.stem.removeprefix("EN-"): _read_set(file) for file in files}


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


def model_embeddings(model: LanguageModel, words: Sequence[str], name: str) -> Embeddings:
    """The word embeddings [V, D] of a model over these V words, in order of class id."""
    weight = model.backbone.embedding.weight.detach()
    index = {word: row for row, word in enumerate(words)}
    return Embeddings(name, index, weight.float().cpu().numpy())


def word_similarity(
    sets: Mapping[str, Sequence[Pair]], embeddings: Sequence[Embeddings], *, common: bool = False
) -> list[Similarities]:
    """Correlations of sets of human scores by name with cosine similarities of the vectors of
    models. Each model is evaluated on all pairs of a set whose words it has, or with ``common`` all
    are on the pairs that every model has; equal values share the mean of their ranks.

    Returns:
        For each set and model the number of ``pairs``, those ``missing``, ``spearman``'s
        ``rho`` and two-sided ``p_value``, and the ends ``low`` and ``high`` of
        ``confidence_interval``: lists with a record for each model, one list for each set.
    """
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
            record = {"set": name, "model": of.name, "pairs": len(pairs), "missing": len(pairs) - n}
            row.append(record | {"rho": rho, "p_value": p_value, "low": low, "high": high})
        found.append(row)
    return found


def mean_similarity(found: Sequence[Similarities], weighted: bool) -> list[float]:
    """The mean rho of each of the M models over the sets on which all models have one, or that
    weighted by the number of pairs; nan if there is no such set."""
    rows = [row for row in found if not any(math.isnan(each["rho"]) for each in row)]
    if not rows:
        return [math.nan] * len(found[0])
    rho = np.array([[each["rho"] for each in row] for row in rows])
    used = np.array([[each["pairs"] - each["missing"] for each in row] for row in rows])
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
    sets = read_similarity_sets(arguments.benchmarks)
    embeddings = [
        model_embeddings(run.model, run.vocabulary.words, name)
        for name, run in load_runs(arguments).items()
    ]
    found = word_similarity(sets, embeddings, common=arguments.common)
    pairs = "that every model has" if arguments.common else "whose words it has"
    note = f"input embeddings, each model on the pairs {pairs}; "
    note += "p-values and 95% intervals are in words.json"
    data = {"common": arguments.common, "correlations": [each for row in found for each in row]}
    tables, pictures = [word_similarity_table(found)], {"similarity": similarity_picture(found)}
    return Report("Word similarity", tables, [note], data, pictures)


def word_similarity_table(found: Sequence[Similarities]) -> Table:
    """A table with a row for each set, then means over the sets if there are several. It has one
    column of missing pairs if their number is the same for all models."""
    models, rho, rows = [each["model"] for each in found[0]], decimals(3), []
    same = all(len({each["missing"] for each in row}) == 1 for row in found)
    header = ["missing"] if same else [f"missing in {model}" for model in models]
    for row in found:
        missing = [count(each["missing"]) for each in row][: len(header)]
        rhos = [rho(each["rho"]) for each in row]
        rows.append((row[0]["set"], count(row[0]["pairs"]), *missing, *rhos))
    if len(found) > 1:
        for name, weighted in (("mean of the sets", False), ("weighted by pairs", True)):
            means = map(rho, mean_similarity(found, weighted))
            rows.append((name, *[""] * (1 + len(header)), *means))
    title = "Spearman's rho of human scores and cosine similarities of word vectors"
    return row_table(title, ("set", "pairs", *header, *models), rows, None, str)


def similarity_picture(found: Sequence[Similarities]) -> Any:
    """Plot a band for each set, with a dot for each model at its rho and a line over its 95%
    confidence interval."""
    n_sets, n_models = len(found), len(found[0])
    figure, axes = panels(7.2, 1.5 + n_sets * (0.2 + 0.1 * n_models), grid="x")
    for m, column in enumerate(zip(*found, strict=True)):
        places = np.arange(n_sets) + (m - (n_models - 1) / 2) * 0.7 / n_models
        colour, label = line_style(m)["color"], plain(column[0]["model"])
        rho, low, high = ([each[key] for each in column] for key in ("rho", "low", "high"))
        axes.plot(rho, places, "o", color=colour, ms=4.5, label=label)
        axes.hlines(places, low, high, colour, lw=1)
    for s in range(0, n_sets, 2):
        axes.axhspan(s - 0.5, s + 0.5, color="0.95", lw=0, zorder=0)
    axes.axvline(0, color="0.4", lw=0.8, zorder=1)
    axes.set_yticks(range(n_sets), [plain(row[0]["set"]) for row in found])
    label = "Spearman's rank correlation with human scores, with 95% interval"
    axes.set(ylim=(n_sets - 0.5, -0.5), xlabel=label)
    legend(figure, loc="upper center", ncols=min(n_models, 4), fontsize=9)
    return figure


_SETS = "folder of word-similarity sets (.txt, .csv, .tsv, .tab), or one such file: lines word1 "
_SETS += "word2 score, and most variants of that format"
_COMMON = "evaluate all models on the pairs that every model has"
COMMAND = Measurement(
    "words",
    "word vectors against human similarity scores",
    measure,
    (
        Argument("--benchmarks", _SETS, metavar="PATH", required=True),
        Argument("--common", _COMMON, action="store_true"),
    ),
    runs="+",
)
