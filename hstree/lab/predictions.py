"""Next words of several models side by side, with the probability and rank of the true word.

The k most probable words of each model in given contexts, which are read after an end of line.
<unk> counts as a word (Parthiban et al., AAAI 2021, compare heads by such lists).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hstree.lm.cli import Argument
from hstree.lm.data import Subwords, prompt_words
from hstree.lm.model import LanguageModel, read_stream
from hstree.lm.report import Table, count, quoted
from hstree.lm.run import Run

from .report import DEVICE, Measurement, Report, load_runs, row_table

_BAR = " | "


class Prediction(NamedTuple):
    """The k most probable words, most probable first, and the true next word."""

    words: tuple[str, ...]
    probabilities: tuple[float, ...]
    true_word: str | None = None  # None if it is unknown or not in the vocabulary
    true_probability: float | None = None
    true_rank: int | None = None  # 1 + the number of more probable words


@torch.no_grad()
def next_log_prob(model: LanguageModel, tokens: Any) -> Tensor:
    """log P [V] of the word after a text [n] of class ids, in nats, float32 or wider."""
    for hidden in read_stream(model, tokens):
        last = hidden[-1:]
    log_prob = model.head.log_prob(last)[0]
    return log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))


def prediction(
    log_prob: Tensor, words: Sequence[str], k: int = 5, true_word: str | None = None
) -> Prediction:
    """The k most probable words of log P [V] over these V words, in order of class id, and the
    probability of the true word."""
    top = log_prob.topk(k)
    likely = tuple(words[c] for c in top.indices.tolist())
    probabilities = tuple(top.values.double().exp().tolist())
    if true_word is None or true_word not in words:
        return Prediction(likely, probabilities)
    value = log_prob[words.index(true_word)]
    rank = 1 + int((log_prob > value).sum())
    return Prediction(likely, probabilities, true_word, math.exp(value), rank)


def measure(arguments: argparse.Namespace) -> Report:
    contexts = [_split(text) for text in arguments.context]
    runs = load_runs(arguments)
    least = min(len(run.vocabulary) for run in runs.values())
    if arguments.top_k > least:
        expected = f"expected at most {least} (the smallest vocabulary)"
        raise ValueError(f"--top-k: {expected}, got {arguments.top_k}")
    notes: list[str] = []
    found: list[dict[str, Any]] = []
    for number, (context, truth) in enumerate(contexts, start=1):
        predictions = []
        for name, run in runs.items():
            words = prompt_words(context, run.vocabulary, run.tokenizer)
            unknown = [word for word in words if word not in run.vocabulary]
            if unknown:
                notes.append(f"context {number}: {name} reads as <unk>: {', '.join(unknown)}")
            tokens = [run.vocabulary.end, *run.vocabulary.encode(words)]
            true_word = truth and _true_word(context, words, truth, run)
            log_prob = next_log_prob(run.model, tokens)
            likely = prediction(log_prob, run.vocabulary.words, arguments.top_k, true_word)
            predictions.append(likely)
        found.append({"context": context, "true_word": truth, "predictions": predictions})
    data = {"models": [*runs], "contexts": found}
    return Report("Next words of several models", prediction_tables(found, [*runs]), notes, data)


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


def prediction_tables(contexts: Sequence[dict[str, Any]], models: Sequence[str]) -> list[Table]:
    """A table for each context, with a column for each model. The true word is in brackets, and its
    probability and rank in the last row. If several contexts have a true word, another table
    summarizes them."""
    tables, summary = [], []
    for number, each in enumerate(contexts, start=1):
        truth, found = each["true_word"], each["predictions"]
        rows = []
        for k in range(len(found[0].words)):
            shown = [(of.words[k], percent(of.probabilities[k])) for of in found]
            cells = [f"[{word}] {p}" if word == truth else f"{word} {p}" for word, p in shown]
            rows.append((str(k + 1), *cells))
        if truth is not None:
            cells = [
                "not in the vocabulary"
                if of.true_probability is None
                else f"{percent(of.true_probability)}, rank {count(of.true_rank)}"
                for of in found
            ]
            rows.append(("true word", *cells))
            summary.append((str(number), truth, *cells))
        title = f"{number}. {each['context']} {'?' if truth is None else f'[{truth}]'}"
        tables.append(row_table(title, ("rank", *models), rows, None))
    if len(summary) > 1:
        title, header = "Probability of the true word, and its rank", ("context", "true word")
        tables.append(row_table(title, (*header, *models), summary, str, None, str))
    return tables


def percent(probability: float) -> str:
    """12.3%, or two significant digits below 0.1%."""
    value = 100 * probability
    return f"{value:.1f}%" if value >= 0.1 or value == 0 else f"{value:.2g}%"


_CONTEXT = (
    "words to read and, optionally, ' | ' and the true next word: 'the company said | it'; a run "
    "with subwords uses its first token; may be repeated"
)
COMMAND = Measurement(
    "predictions",
    "next words of several models",
    measure,
    (
        Argument("--context", _CONTEXT, None, action="append", metavar="TEXT", required=True),
        Argument("--top-k", "number of words to show", 5, metavar="K"),
        *DEVICE,
    ),
    runs="+",
)
