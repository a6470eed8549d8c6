"""``hstree analyze wins``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm.runs import Run
from hstree.lm.table import Table, decimals, table

from ..report import Report
from ..runner import Argument, Measurement, load_runs
from .compute import PairwiseWins, pairwise_wins
from .picture import wins_picture


def measure(arguments: argparse.Namespace) -> Report:
    """Count hits and wins of several runs on one text."""
    if len(arguments.directories) < 2:
        raise ValueError(f"RUN: expected at least two runs, got {arguments.directories[0]} alone")
    runs = load_runs(arguments)
    _check_vocabularies(runs)
    text, tokens = _one_text(runs, arguments.settings.data, arguments.split)
    if len(tokens) < 2:
        raise ValueError(
            f"{text}: the {arguments.split} part has {len(tokens)} tokens, at least 2 are needed"
        )
    found = pairwise_wins({name: run.model for name, run in runs.items()}, tokens)
    return Report(
        "Hits and pairwise wins",
        wins_tables(found),
        [
            f"{found.tokens:,} tokens of the {arguments.split} part of {text}, read as one stream "
            "by each model",
            "a token is predicted if no other word is more probable, and none of the equally "
            "probable ones comes before it in the vocabulary",
            *_ties(found),
        ],
        found,
        wins_rows(found),
        {"": wins_picture(found)},
    )


def _check_vocabularies(runs: Mapping[str, Run]) -> None:
    (first, one), *others = [(name, run.vocabulary.words) for name, run in runs.items()]
    for name, words in others:
        if words != one:
            same = "of the same size with other words or in another order"
            size = same if len(words) == len(one) else f"with {len(words):,} words"
            raise ValueError(
                f"RUN: expected runs with one vocabulary, but that of {first} has {len(one):,} "
                f"words, and {name} has one {size}"
            )


def _one_text(
    runs: Mapping[str, Run], data: str | None, split: str
) -> tuple[str, npt.NDArray[Any]]:
    """The name of the text, and the tokens that all runs read."""
    found = {name: run.corpus(data) for name, run in runs.items()}
    (first, corpus), *others = found.items()
    tokens = getattr(corpus, split)
    for name, other in others:
        if not np.array_equal(getattr(other, split), tokens):
            raise ValueError(
                f"RUN: expected runs on one text, but the {split} parts of {first} and {name} "
                "differ; name one text with --data"
            )
    return corpus.name, tokens


def _ties(found: PairwiseWins) -> list[str]:
    """Notes on the pairs with tokens of the same probability."""
    ties = found.tokens - found.wins - found.wins.T
    n = len(found.models)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if ties[i, j]]
    return [
        f"{found.models[i]} and {found.models[j]} give {int(ties[i, j]):,} tokens the same "
        "probability: a win of neither"
        for i, j in pairs
    ]


def wins_tables(found: PairwiseWins) -> list[Table]:
    """Tables of hits and of wins, in percent of the tokens."""
    hits, wins = (100 * counts / found.tokens for counts in (found.hits, found.wins))
    np.fill_diagonal(wins, np.nan)
    return [
        _matrix(
            "Tokens that the row predicts and the column does not (%); diagonal: tokens that the "
            "model predicts",
            found.models,
            hits,
        ),
        _matrix(
            "Tokens that are more probable to the row than to the column (%)", found.models, wins
        ),
    ]


def _matrix(title: str, names: tuple[str, ...], values: npt.NDArray[np.float64]) -> Table:
    def cell(column: int, row: tuple[str, npt.NDArray[np.float64]]) -> float:
        return float(row[1][column])

    rows = list(zip(names, values, strict=True))
    two = decimals(2)
    return table(
        title,
        rows,
        [("model", itemgetter(0)), *((n, partial(cell, k), two) for k, n in enumerate(names))],
    )


def wins_rows(found: PairwiseWins) -> list[dict[str, Any]]:
    """A row for each ordered pair of models, with counts; for a model with itself, ``hits`` is the
    number of tokens that it predicts."""
    return [
        {
            "first": first,
            "second": second,
            "tokens": found.tokens,
            "hits": int(found.hits[i, j]),
            "wins": int(found.wins[i, j]),
        }
        for i, first in enumerate(found.models)
        for j, second in enumerate(found.models)
    ]


COMMAND = Measurement(
    "wins",
    "tokens that one model predicts and another does not",
    """\
Compare the predictions of several models on the tokens of a text, in two matrices with a row and a
column for each model: the share of the tokens that one model predicts (its most probable word is
the next one) and the other does not, and the share to which one model gives a higher probability
than the other. The runs must have the same vocabulary.
""",
    measure,
    (Argument("--split", choices=("test", "valid"), default="test", help="part of the text"),),
    runs="+",
    settings=("data", "device", "threads"),
    output="wins",
)
