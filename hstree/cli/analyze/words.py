"""``hstree analyze words``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..results import add_output_argument, publish, results_folder
from ..runs import run_names

if TYPE_CHECKING:
    from hstree.analysis import Embeddings, SimilaritySet

_DESCRIPTION = """\
Word similarity: Spearman's rank correlation between human scores of pairs of words and the cosine
similarity of the vectors that models have learned. A word is looked up as it is written, else in
lower case; pairs with a word that a model does not have are left out and counted.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "words", help="word vectors against human similarity scores", description=_DESCRIPTION
    )
    parser.add_argument("directories", metavar="RUN", nargs="*", help="run folders of hstree train")
    parser.add_argument(
        "--benchmarks",
        metavar="PATH",
        required=True,
        help="folder of word-similarity sets (.txt, .csv, .tsv, .tab), or one such file: "
        "word1 word2 score a line, and most distributed variants of that",
    )
    parser.add_argument(
        "--vectors",
        choices=("input", "output"),
        default="input",
        help="the word embeddings, or the output layer's class vectors, which trees and the "
        "adaptive softmax do not have (default: input)",
    )
    parser.add_argument(
        "--embeddings",
        action="append",
        default=[],
        metavar="FILE",
        help="also the vectors in this text file of word2vec or GloVe; may be repeated",
    )
    parser.add_argument(
        "--common",
        action="store_true",
        help="judge all on the pairs that every one of them has",
    )
    add_output_argument(parser, "words")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.analysis import (
        read_similarity_sets,
        word_similarity,
        word_similarity_plot,
        word_similarity_rows,
        word_similarity_table,
    )

    if not arguments.directories and not arguments.embeddings:
        raise ValueError("RUN: expected at least one run folder, or --embeddings FILE, got neither")
    sets = read_similarity_sets(arguments.benchmarks)
    folder = results_folder(arguments)
    result = word_similarity(sets, _embeddings(arguments, sets), common=arguments.common)
    rows = word_similarity_rows(result)
    data = {
        "vectors": arguments.vectors,
        "common": arguments.common,
        "correlations": rows,
        "mean": dict(zip(result.models, result.mean(), strict=True)),
        "mean_weighted_by_pairs": dict(zip(result.models, result.mean(weighted=True), strict=True)),
    }
    publish(
        folder,
        "words",
        "Word similarity",
        [word_similarity_table(result)],
        data,
        {"words-similarity.png": word_similarity_plot(result)},
        [_note(arguments)],
        rows=rows,
    )
    return 0


def _embeddings(arguments: argparse.Namespace, sets: tuple[SimilaritySet, ...]) -> list[Embeddings]:
    from hstree.analysis import model_embeddings, read_embeddings
    from hstree.training import load_run

    names = run_names([*arguments.directories, *arguments.embeddings])
    n_runs = len(arguments.directories)
    wanted = {word for each in sets for pair in each.pairs for word in pair}
    found = [
        read_embeddings(file, wanted, name)
        for file, name in zip(arguments.embeddings, names[n_runs:], strict=True)
    ]
    runs = map(load_run, arguments.directories)
    of_runs = [
        model_embeddings(run.model, run.vocabulary.words, name, arguments.vectors)
        for run, name in zip(runs, names[:n_runs], strict=True)
    ]
    return of_runs + found


def _note(arguments: argparse.Namespace) -> str:
    which = {"input": "input embeddings", "output": "output class vectors"}[arguments.vectors]
    pairs = "that every model has" if arguments.common else "whose words it has"
    return (
        f"{which}, each model on the pairs {pairs}; "
        "p-values and 95% intervals are in words.csv and words.json"
    )
