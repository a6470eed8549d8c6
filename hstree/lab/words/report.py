"""``hstree analyze words``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from hstree.lm._arguments import Argument
from hstree.lm._pictures import COLOURS, legend, panels, plain
from hstree.lm.runs import load_run, run_names
from hstree.lm.table import Table, count, decimals

from ..drawing import MARKERS
from ..report import Report, row_table
from ..runner import Measurement
from .compute import VECTORS, WordSimilarity, mean_similarity, model_embeddings, word_similarity
from .files import read_embeddings, read_similarity_sets


def measure(arguments: argparse.Namespace) -> Report:
    places = [*arguments.directories, *arguments.embeddings]
    if not places:
        raise ValueError("RUN: expected at least one run folder, or --embeddings FILE, got neither")
    sets = read_similarity_sets(arguments.benchmarks)
    wanted = {word for pairs in sets.values() for *pair, _ in pairs for word in pair}
    embeddings = []
    for number, (name, place) in enumerate(zip(run_names(places), places, strict=True)):
        if number < len(arguments.directories):
            run = load_run(place)
            words = run.vocabulary.words
            embeddings.append(model_embeddings(run.model, words, name, arguments.vectors))
        else:
            embeddings.append(read_embeddings(place, wanted, name))
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
    least, most = min(each.used for each in row), max(each.used for each in row)
    pairs = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{plain(row[0].set)} ({pairs} pairs)"


COMMAND = Measurement(
    "words",
    "word vectors against human similarity scores",
    """\
Word similarity: Spearman's rank correlation between human scores of pairs of words and the cosine
similarity of the vectors that models have learned. A word is looked up as written, otherwise in
lower case. Pairs with a word that a model does not have are excluded and counted.
""",
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
            "--embeddings",
            "also evaluate the vectors in this text file of word2vec or GloVe; may be repeated",
            [],
            action="append",
            metavar="FILE",
        ),
        Argument(
            "--common", "evaluate all models on the pairs that every model has", action="store_true"
        ),
    ),
    runs="*",
)
