"""``hstree analyze predictions``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hstree.lm._arguments import Argument
from hstree.lm._arguments import count as whole
from hstree.lm._messages import quoted
from hstree.lm.data import Subwords, prompt_words
from hstree.lm.runs import Run
from hstree.lm.table import Table, count

from ..report import Report, row_table
from ..runner import Measurement, load_runs
from .compute import Prediction, log_prob_at, prediction, random_positions

_BAR = " | "


@dataclass(frozen=True)
class ContextPredictions:
    """The predictions of several models in one context: the last words that they have read, the
    true next word if it is known, its position in the test text, and a prediction for each."""

    context: str
    true_word: str | None
    position: int | None
    predictions: tuple[Prediction, ...]


def measure(arguments: argparse.Namespace) -> Report:
    if not arguments.context and arguments.random is None:
        raise ValueError("--context: expected at least one, or --random N, got neither")
    if arguments.settings.data is not None and arguments.random is None:
        raise ValueError("--data: has no effect without --random")
    if arguments.seed < 0:
        raise ValueError(f"--seed: expected at least 0, got {arguments.seed}")
    contexts = [_split(text) for text in arguments.context]
    runs = load_runs(arguments)
    least = min(len(run.vocabulary) for run in runs.values())
    if arguments.top_k > least:
        raise ValueError(
            f"--top-k: expected at most {least} (the smallest vocabulary), got {arguments.top_k}"
        )
    notes: list[str] = []
    found = []
    for number, (context, truth) in enumerate(contexts, start=1):
        predictions = []
        for name, run in runs.items():
            words = prompt_words(context, run.vocabulary, run.tokenizer)
            unknown = [word for word in words if word not in run.vocabulary]
            if unknown:
                notes.append(f"context {number}: {name} reads as <unk>: {', '.join(unknown)}")
            tokens = [run.vocabulary.end, *run.vocabulary.encode(words)]
            log_prob = log_prob_at(run.model, tokens, [len(tokens)])[0]
            true_word = truth and _true_word(context, words, truth, run)
            likely = prediction(log_prob, run.vocabulary.words, arguments.top_k, true_word)
            predictions.append(likely)
        found.append(ContextPredictions(context, truth, None, tuple(predictions)))
    if arguments.random is not None:
        drawn, text = _drawn(arguments, runs)
        found += drawn
        notes.append(
            f"{arguments.random} words of the test text of {text}, drawn with seed "
            f"{arguments.seed} among those that every model knows; each model has read the whole "
            f"test text before them; the last {arguments.preceding} words are shown"
        )
    names = list(runs)
    return Report(
        "Next words of several models",
        prediction_tables(found, names),
        notes,
        {"models": names, "contexts": found},
        list(prediction_rows(found, names)),
    )


def _split(text: str) -> tuple[str, str | None]:
    context, bar, truth = text.rpartition(_BAR) if _BAR in text else (text, "", "")
    if not context.strip() or (bar and not truth.strip()):
        raise ValueError(f"--context: expected words, or words{_BAR}true word, got {quoted(text)}")
    return context, truth.strip() or None


def _true_word(context: str, words: list[str], truth: str, run: Run) -> str:
    """The true word in a run's vocabulary: with subwords, the first token that it adds."""
    found = prompt_words(truth, run.vocabulary, run.tokenizer)
    if isinstance(run.tokenizer, Subwords):
        longer = prompt_words(f"{context} {truth}", run.vocabulary, run.tokenizer)
        if len(longer) > len(words) and longer[: len(words)] == words:
            return longer[len(words)]
    elif len(found) != 1:
        raise ValueError(f"--context: expected one word after{_BAR}, got {quoted(truth)}")
    return found[0]


def _drawn(
    arguments: argparse.Namespace, runs: Mapping[str, Run]
) -> tuple[list[ContextPredictions], str]:
    """Predictions at random positions of the test text, and the name of the text."""
    corpora = [
        run.corpus(arguments.settings.data, arguments.settings.column) for run in runs.values()
    ]
    texts = [corpus.test for corpus in corpora]
    _check_alike([(c.tokenizer.identity, len(c.test)) for c in corpora], list(runs))
    unknown = [corpus.vocabulary.unknown for corpus in corpora]
    positions = random_positions(texts, unknown, arguments.random, arguments.seed)
    _check_alike([c.vocabulary.decode(c.test[positions].tolist()) for c in corpora], list(runs))
    log_probs = [
        log_prob_at(run.model, text, positions)
        for run, text in zip(runs.values(), texts, strict=True)
    ]
    vocabulary, tokenizer = corpora[0].vocabulary, next(iter(runs.values())).tokenizer
    found = []
    for row, position in enumerate(positions):
        begin = max(0, position - arguments.preceding)
        words = vocabulary.decode(texts[0][begin:position].tolist())
        context = "\N{HORIZONTAL ELLIPSIS} " if begin else ""
        context += tokenizer.join(words) if isinstance(tokenizer, Subwords) else " ".join(words)
        truth = vocabulary.words[texts[0][position]]
        predictions = tuple(
            prediction(log_prob[row], run.vocabulary.words, arguments.top_k, truth)
            for log_prob, run in zip(log_probs, runs.values(), strict=True)
        )
        found.append(ContextPredictions(context, truth, position, predictions))
    return found, corpora[0].name


def _check_alike(values: Sequence[Any], names: Sequence[str]) -> None:
    for value, name in zip(values, names, strict=True):
        if value != values[0]:
            raise ValueError(
                f"--random: expected one test text with the same tokens for all runs, but those of "
                f"{names[0]} and {name} differ; name one text with --data, or use --context"
            )


def prediction_tables(contexts: Sequence[ContextPredictions], models: Sequence[str]) -> list[Table]:
    """A table for each context, with a column for each model. The true word is in brackets, and its
    probability and rank in the last row. If several contexts have a true word, another table
    summarizes them."""
    tables, summary = [], []
    for number, each in enumerate(contexts, start=1):
        columns = [_likely_cells(prediction) for prediction in each.predictions]
        rows = [(str(rank), *cells) for rank, cells in enumerate(zip(*columns, strict=True), 1)]
        truth = "?"
        if each.true_word is not None:
            truth = f"[{each.true_word}]"
            cells = tuple(map(_true_cell, each.predictions))
            rows.append(("true word", *cells))
            summary.append((str(number), each.true_word, *cells))
        title = f"{number}. {each.context} {truth}"
        tables.append(row_table(title, ("rank", *models), rows, None))
    if len(summary) > 1:
        title, header = "Probability of the true word, and its rank", ("context", "true word")
        tables.append(row_table(title, (*header, *models), summary, str, None, str))
    return tables


def _likely_cells(each: Prediction) -> list[str]:
    return [
        f"{f'[{word}]' if word == each.true_word else word} {percent(probability)}"
        for word, probability in zip(each.words, each.probabilities, strict=True)
    ]


def _true_cell(each: Prediction) -> str:
    if each.true_probability is None:
        return "not in the vocabulary"
    return f"{percent(each.true_probability)}, rank {count(each.true_rank)}"


def percent(probability: float) -> str:
    """12.3%, or two significant digits below 0.1%."""
    value = 100 * probability
    return f"{value:.1f}%" if value >= 0.1 or value == 0 else f"{value:.2g}%"


def prediction_rows(
    contexts: Sequence[ContextPredictions], models: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each context, model and rank, in full precision, and one for a true word that is
    not among the first k."""
    keys = ("context", "model", "rank", "word", "probability", "true")
    for number, context in enumerate(contexts, start=1):
        for name, each in zip(models, context.predictions, strict=True):
            ranked: list[Any] = list(enumerate(zip(each.words, each.probabilities, strict=True), 1))
            if each.true_word is not None and each.true_word not in each.words:
                ranked.append((each.true_rank, (each.true_word, each.true_probability)))
            for rank, (word, probability) in ranked:
                cells = (number, name, rank, word, probability, word == each.true_word)
                yield dict(zip(keys, cells, strict=True))


COMMAND = Measurement(
    "predictions",
    "next words of several models",
    """\
Compare the most probable next words of several models, in given contexts or at random positions of
the test text, with the probability and rank of the true word. A given context is read after an end
of line. At a random position, a model has read the whole test text before it as one stream. <unk>
counts as a word.
""",
    measure,
    (
        Argument(
            "--context",
            "words to read and, optionally, ' | ' and the true next word: 'the company said "
            "| it'; a run with subwords uses its first token; may be repeated",
            [],
            action="append",
            metavar="TEXT",
        ),
        Argument(
            "--random",
            "draw N words of the test text other than <unk>, with all words before them",
            type=whole,
        ),
        Argument("--seed", "seed of --random", 0, type=int),
        Argument("--preceding", "number of words shown before a drawn word", 15),
        Argument("--top-k", "number of words to show", 5, metavar="K"),
    ),
    runs="+",
    settings=("data", "column", "device", "threads"),
)
