"""What models expect next: their most probable words in a context, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.models import LanguageModel, read_stream

from .table import Table, count, table


@dataclass(frozen=True)
class Prediction:
    """A model's next word.

    Attributes:
        words: the k most probable, most probable first.
        probabilities: theirs.
        true_word: what the model calls the word that came; None if that is not known, or no word of
            its vocabulary.
        true_probability: its probability.
        true_rank: 1 + the number of more probable words.
    """

    words: tuple[str, ...]
    probabilities: tuple[float, ...]
    true_word: str | None = None
    true_probability: float | None = None
    true_rank: int | None = None


@dataclass(frozen=True)
class ContextPredictions:
    """What several models make of one context.

    Attributes:
        context: the last words that they have read, as text.
        true_word: the word that came; None if it is not known.
        position: number of the true word in its text, from 0; None for a context of its own.
        predictions: one for each model.
    """

    context: str
    true_word: str | None
    position: int | None
    predictions: tuple[Prediction, ...]


@torch.no_grad()
def log_prob_at(model: LanguageModel, tokens: Any, positions: Sequence[int]) -> Tensor:
    """Log-probabilities of the words at some positions of a text, given all words before them.

    The text is read as one stream from its first word, as the field does, so that a context reaches
    back beyond its sentence. Memory O(len(positions) V) beside the model's own.

    Args:
        model: put in evaluation mode for the while.
        tokens: class ids [n] of any integer type; read up to the last position.
        positions: in [1, n]; n stands for the word that follows the text.

    Returns:
        log P [len(positions), V], in nats, float32 or wider.

    Raises:
        ValueError: no positions, or one out of range.
    """
    if not positions or min(positions) < 1 or max(positions) > len(tokens):
        raise ValueError(
            f"positions: expected at least one, all from 1 to {len(tokens)}, got {list(positions)}"
        )
    wanted = sorted(set(positions))
    found: dict[int, Tensor] = {}
    read = 0
    for hidden in read_stream(model, np.asarray(tokens)[: wanted[-1]]):
        here = [p for p in wanted if read < p <= read + len(hidden)]
        if here:
            log_prob = model.head.log_prob(hidden[[p - 1 - read for p in here]])
            found |= zip(here, log_prob, strict=True)
        read += len(hidden)
    log_prob = torch.stack([found[p] for p in positions])
    return log_prob.to(torch.promote_types(log_prob.dtype, torch.float32))


def prediction(
    log_prob: Tensor, words: Sequence[str], k: int = 5, true_word: str | None = None
) -> Prediction:
    """The k most probable words of a distribution, and how probable the word was that came.

    Args:
        log_prob: [V], in nats.
        words: the V words.
        k: how many.
        true_word: the word that came, if it is known.

    Raises:
        ValueError: k outside [1, V], or shapes that do not fit.
    """
    if log_prob.shape != (len(words),):
        raise ValueError(f"log_prob: expected shape [{len(words)}], got {tuple(log_prob.shape)}")
    if not 1 <= k <= len(words):
        raise ValueError(f"k: expected 1 to {len(words)} (the number of classes), got {k}")
    values, classes = log_prob.topk(k)
    top = tuple(words[number] for number in classes.tolist())
    probabilities = tuple(values.double().exp().tolist())
    if true_word is None or true_word not in words:
        return Prediction(top, probabilities)
    value = log_prob[words.index(true_word)]
    rank = 1 + int((log_prob > value).sum())
    return Prediction(top, probabilities, true_word, math.exp(float(value)), rank)


def random_positions(
    texts: Sequence[npt.NDArray[Any]], unknown: Sequence[int], n: int, seed: int = 0
) -> list[int]:
    """Positions of a text, drawn without replacement from those whose word every model knows.

    Args:
        texts: class ids [length] of the same text in the vocabulary of each model.
        unknown: class id of ``<unk>`` in each of these vocabularies.
        n: how many to draw.
        seed: of the draw; the same seed gives the same positions on every machine.

    Returns:
        In rising order, all at least 1.

    Raises:
        ValueError: texts of different lengths, or n outside [1, number of such positions].
    """
    lengths = sorted({len(text) for text in texts})
    if len(lengths) != 1:
        raise ValueError(
            f"texts: expected one text, split alike for all models, got {lengths} tokens"
        )
    known = np.logical_and.reduce(
        [np.asarray(text) != number for text, number in zip(texts, unknown, strict=True)]
    )
    known[:1] = False
    candidates = np.flatnonzero(known)
    if not 1 <= n <= len(candidates):
        raise ValueError(
            f"n: expected 1 to {len(candidates)} (positions with a known word), got {n}"
        )
    drawn = np.random.default_rng(seed).choice(candidates, n, replace=False)
    return sorted(drawn.tolist())


def prediction_tables(contexts: Sequence[ContextPredictions], models: Sequence[str]) -> list[Table]:
    """A table for each context, with a column for each model; the true word stands in brackets, and
    in the last row its probability and rank. Where there are several contexts with a true word, one
    more table sums them up."""
    tables = [_context_table(number, each, models) for number, each in enumerate(contexts, 1)]
    known = [(n, c) for n, c in enumerate(contexts, 1) if c.true_word is not None]
    if len(known) > 1:
        columns = [
            ("context", True, [str(number) for number, _ in known]),
            ("true word", False, [str(context.true_word) for _, context in known]),
        ]
        for m, name in enumerate(models):
            columns.append((name, True, [_true_cell(c.predictions[m]) for _, c in known]))
        tables.append(table("Probability of the true word, and its rank", columns))
    return tables


def _context_table(number: int, context: ContextPredictions, models: Sequence[str]) -> Table:
    k = len(context.predictions[0].words)
    rows = [str(rank) for rank in range(1, k + 1)]
    has_truth = context.true_word is not None
    columns = [("rank", False, rows + ["true word"] * has_truth)]
    for name, each in zip(models, context.predictions, strict=True):
        cells = [
            f"{f'[{word}]' if word == each.true_word else word} {percent(probability)}"
            for word, probability in zip(each.words, each.probabilities, strict=True)
        ]
        columns.append((name, False, cells + [_true_cell(each)] * has_truth))
    truth = f" [{context.true_word}]" if has_truth else " ?"
    return table(f"{number}. {context.context}{truth}", columns)


def _true_cell(each: Prediction) -> str:
    if each.true_probability is None or each.true_rank is None:
        return "not in the vocabulary"
    return f"{percent(each.true_probability)}, rank {count(each.true_rank)}"


def percent(probability: float) -> str:
    """12.3%, or two significant digits below 0.1%."""
    value = 100 * probability
    return f"{value:.1f}%" if value >= 0.1 or value == 0 else f"{value:.2g}%"


def prediction_rows(
    contexts: Sequence[ContextPredictions], models: Sequence[str]
) -> list[dict[str, Any]]:
    """One for each context, model and rank, in full digits, and one for a true word that is not
    among the first k."""
    rows = []
    for number, context in enumerate(contexts, start=1):
        for name, each in zip(models, context.predictions, strict=True):
            ranked = [
                (rank, word, probability)
                for rank, (word, probability) in enumerate(
                    zip(each.words, each.probabilities, strict=True), start=1
                )
            ]
            if each.true_word is not None and each.true_word not in each.words:
                ranked.append((each.true_rank or 0, each.true_word, each.true_probability or 0.0))
            rows += [
                {
                    "context": number,
                    "model": name,
                    "rank": rank,
                    "word": word,
                    "probability": probability,
                    "true": word == each.true_word,
                }
                for rank, word, probability in ranked
            ]
    return rows
