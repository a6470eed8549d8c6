"""``hstree analyze wins``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm._pictures import panels
from hstree.lm.runs import Run, TrainConfig
from hstree.lm.table import Table, decimals

from ..drawing import NUMBERED, heat_map
from ..report import Report, matrix_table
from ..runner import SPLIT, Measurement, load_runs
from .compute import PairwiseWins, pairwise_wins


def measure(arguments: argparse.Namespace) -> Report:
    if len(arguments.directories) < 2:
        raise ValueError(f"RUN: expected at least two runs, got {arguments.directories[0]} alone")
    runs = load_runs(arguments)
    _check_vocabularies(runs)
    text, tokens = _one_text(runs, arguments.settings, arguments.split)
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
    runs: Mapping[str, Run], settings: TrainConfig, split: str
) -> tuple[str, npt.NDArray[Any]]:
    """The name of the text, and the tokens that all runs read."""
    found = {name: run.corpus(settings.data, settings.column) for name, run in runs.items()}
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
    ties = found.tokens - found.wins - found.wins.T
    n = len(found.models)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n) if ties[i, j]]
    return [
        f"{found.models[i]} and {found.models[j]} give {int(ties[i, j]):,} tokens the same "
        "probability: a win of neither"
        for i, j in pairs
    ]


def wins_tables(found: PairwiseWins) -> list[Table]:
    hits, wins = (100 * counts / found.tokens for counts in (found.hits, found.wins))
    np.fill_diagonal(wins, np.nan)
    hit = "Tokens that the row predicts and the column does not (%); diagonal: tokens that the "
    won = "Tokens that are more probable to the row than to the column (%)"
    return [
        matrix_table(f"{hit}model predicts", found.models, hits, decimals(2)),
        matrix_table(won, found.models, wins, decimals(2)),
    ]


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


def wins_picture(found: PairwiseWins) -> Any:
    """Plot both matrices, in percent of the tokens; wins are colored by their distance from 50%.
    The picture grows with the number of models, and with the length of their names."""
    n = len(found.models)
    hits, wins = (100 * counts / found.tokens for counts in (found.hits, found.wins))
    cells = max(3.0, 0.6 * min(n, NUMBERED))
    names = 0.08 * max(map(len, found.models)) if n <= NUMBERED else 0.0
    width, height = 2 * (cells + names + 1.2), cells + names + 1.0
    figure, (first, second) = panels(width, height, 1, 2, grid=None)
    texts = [[f"{value:.1f}" for value in row] for row in hits]
    heat_map(first, hits, found.models, texts, cmap="cividis")
    first.set_title("predicted by the row, not by the column\n(diagonal: by the model)", fontsize=9)
    texts = [["-" if i == j else f"{wins[i, j]:.1f}" for j in range(n)] for i in range(n)]
    far = max(1.0, np.abs(wins - 50)[~np.eye(n, dtype=bool)].max())
    heat_map(second, wins, found.models, texts, cmap="PuOr", vmin=50 - far, vmax=50 + far)
    second.set_title("more probable to the row\nthan to the column", fontsize=9)
    figure.supxlabel(f"% of {found.tokens:,} tokens", fontsize=9)
    return figure


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
    (SPLIT,),
    runs="+",
    settings=("data", "column", "device", "threads"),
)
