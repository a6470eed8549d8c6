"""Next words of several models side by side, with the probability and rank of the true word.

The k most probable words of each model in given contexts, or at random positions of the test text.
A given context is read after an end of line. At a random position, a model has read the whole test
text before it as one stream. <unk> counts as a word (Parthiban et al., AAAI 2021, compare heads by
such lists).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.lm.cli import Argument
from hstree.lm.cli import count as whole
from hstree.lm.data import Subwords, prompt_words
from hstree.lm.model import LanguageModel, read_stream
from hstree.lm.report import Table, count, quoted
from hstree.lm.run import Run

from .report import Measurement, Report, load_runs, row_table

_BAR = " | "


class Prediction(NamedTuple):
    """The k most probable words, most probable first, and their probabilities; the true next word,
    its probability and its rank, 1 + the number of more probable words, None if it is unknown or
    not in the vocabulary."""

    words: tuple[str, ...]
    probabilities: tuple[float, ...]
    true_word: str | None = None
    true_probability: float | None = None
    true_rank: int | None = None


class ContextPredictions(NamedTuple):
    """The predictions of several models in one context: the last words that they have read, the
    true next word if it is known, its position in the test text, and a prediction for each."""

    context: str
    true_word: str | None
    position: int | None
    predictions: tuple[Prediction, ...]


@torch.no_grad()
def log_prob_at(model: LanguageModel, tokens: Any, positions: Sequence[int]) -> Tensor:
    """log P [len(positions), V] in nats, float32 or wider, at positions 1 to n of a text [n], given
    all words before them; n is the word after the text. The text is read as one stream from its
    first word, as is usual in language modeling, so that a context extends beyond its sentence.
    Raises ValueError if there are no positions, or one is out of range."""
    if not positions or min(positions) < 1 or max(positions) > len(tokens):
        raise ValueError(
            f"positions: expected at least one, all from 1 to {len(tokens)}, got {list(positions)}"
        )
    found: dict[int, Tensor] = {}
    read = 0
    for hidden in read_stream(model, np.asarray(tokens)[: max(positions)]):
        here = [p for p in set(positions) if read < p <= read + len(hidden)]
        if here:
            log_prob = model.head.log_prob(hidden[[p - 1 - read for p in here]])
            found |= zip(here, log_prob, strict=True)
        read += len(hidden)
    log_prob = torch.stack([found[p] for p in positions])
    return log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))


def prediction(
    log_prob: Tensor, words: Sequence[str], k: int = 5, true_word: str | None = None
) -> Prediction:
    """The k most probable words of log P [V] over these V words, in order of class id, and the
    probability of the true word. Raises ValueError if k is outside [1, V], or shapes differ."""
    if log_prob.shape != (len(words),):
        raise ValueError(f"log_prob: expected shape [{len(words)}], got {tuple(log_prob.shape)}")
    if not 1 <= k <= len(words):
        raise ValueError(f"k: expected 1 to {len(words)} (the number of classes), got {k}")
    top = log_prob.topk(k)
    likely = tuple(words[c] for c in top.indices.tolist())
    probabilities = tuple(top.values.double().exp().tolist())
    if true_word is None or true_word not in words:
        return Prediction(likely, probabilities)
    value = log_prob[words.index(true_word)]
    rank = 1 + int((log_prob > value).sum())
    return Prediction(likely, probabilities, true_word, math.exp(value), rank)


def random_positions(
    texts: Sequence[npt.NDArray[Any]], unknown: Sequence[int], n: int, seed: int = 0
) -> list[int]:
    """Draw n positions of a text without replacement, in increasing order and at least 1, among
    those whose word every model knows: ``texts`` are the class ids of the same text in each model's
    vocabulary, ``unknown`` that of ``<unk>`` in each. A seed gives the same positions on every
    machine. Raises ValueError if the lengths differ, or there are fewer such positions."""
    lengths = sorted({len(text) for text in texts})
    if len(lengths) != 1:
        expected = "expected one text with the same tokens for all models"
        raise ValueError(f"texts: {expected}, got {lengths} tokens")
    known = np.all([text != word for text, word in zip(texts, unknown, strict=True)], axis=0)
    candidates = 1 + np.flatnonzero(known[1:])
    if not 1 <= n <= len(candidates):
        known_words = f"{len(candidates)} (positions with a known word)"
        raise ValueError(f"n: expected 1 to {known_words}, got {n}")
    return sorted(np.random.default_rng(seed).choice(candidates, n, replace=False).tolist())


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
        expected = f"expected at most {least} (the smallest vocabulary)"
        raise ValueError(f"--top-k: {expected}, got {arguments.top_k}")
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
        columns = [
            [
                f"{f'[{w}]' if w == each.true_word else w} {percent(p)}"
                for w, p in zip(*of[:2], strict=True)
            ]
            for of in each.predictions
        ]
        rows = [(str(rank), *cells) for rank, cells in enumerate(zip(*columns, strict=True), 1)]
        truth = "?"
        if each.true_word is not None:
            truth = f"[{each.true_word}]"
            cells = [
                "not in the vocabulary"
                if of.true_probability is None
                else f"{percent(of.true_probability)}, rank {count(of.true_rank)}"
                for of in each.predictions
            ]
            rows.append(("true word", *cells))
            summary.append((str(number), each.true_word, *cells))
        title = f"{number}. {each.context} {truth}"
        tables.append(row_table(title, ("rank", *models), rows, None))
    if len(summary) > 1:
        title, header = "Probability of the true word, and its rank", ("context", "true word")
        tables.append(row_table(title, (*header, *models), summary, str, None, str))
    return tables


def percent(probability: float) -> str:
    """12.3%, or two significant digits below 0.1%."""
    value = 100 * probability
    return f"{value:.1f}%" if value >= 0.1 or value == 0 else f"{value:.2g}%"


def prediction_rows(
    contexts: Sequence[ContextPredictions], models: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each context, model and rank, in full precision, and one for a true word that is
    not among the first k."""
    for number, context in enumerate(contexts, start=1):
        for name, of in zip(models, context.predictions, strict=True):
            ranked: list[Any] = [
                *zip(range(1, len(of.words) + 1), of.words, of.probabilities, strict=True)
            ]
            if of.true_word is not None and of.true_word not in of.words:
                ranked.append((of.true_rank, of.true_word, of.true_probability))
            for rank, word, probability in ranked:
                row = {"context": number, "model": name, "rank": rank, "word": word}
                yield row | {"probability": probability, "true": word == of.true_word}


COMMAND = Measurement(
    "predictions",
    "next words of several models",
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
