"""The most probable next words of models in a context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.lm.models import LanguageModel, read_stream


@dataclass(frozen=True)
class Prediction:
    """A model's prediction of the next word.

    Attributes:
        words: the k most probable words, most probable first.
        probabilities: their probabilities.
        true_word: the true next word in the model's vocabulary; None if it is unknown or not in the
            vocabulary.
        true_probability: its probability.
        true_rank: 1 + the number of more probable words.
    """

    words: tuple[str, ...]
    probabilities: tuple[float, ...]
    true_word: str | None = None
    true_probability: float | None = None
    true_rank: int | None = None


@torch.no_grad()
def log_prob_at(model: LanguageModel, tokens: Any, positions: Sequence[int]) -> Tensor:
    """Compute log-probabilities at some positions of a text, given all words before them.

    The text is read as one stream from its first word, as is usual in language modeling, so that a
    context extends beyond its sentence. Memory: O(len(positions) V) in addition to the model's.

    Args:
        model: language model, temporarily put in evaluation mode.
        tokens: class ids, [n], of any integer type; read up to the last position.
        positions: indices in [1, n]; n is the word after the text.

    Returns:
        log P, [len(positions), V], in nats, float32 or wider.

    Raises:
        ValueError: there are no positions, or one is out of range.
    """
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
    """Summarize a distribution: its k most probable words, and the probability of the true word.

    Args:
        log_prob: log-probabilities, [V], in nats.
        words: the V words in order of class id.
        k: number of words to return.
        true_word: the true next word, if it is known.

    Raises:
        ValueError: k is outside [1, V], or shapes do not match.
    """
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
    """Draw positions of a text without replacement among those whose word every model knows.

    Args:
        texts: class ids [length] of the same text in the vocabulary of each model.
        unknown: class id of ``<unk>`` in each vocabulary.
        n: number of positions to draw.
        seed: seed of the draw; it gives the same positions on every machine.

    Returns:
        The positions in increasing order, all at least 1.

    Raises:
        ValueError: texts have different lengths, or n is outside [1, number of such positions].
    """
    lengths = sorted({len(text) for text in texts})
    if len(lengths) != 1:
        raise ValueError(
            f"texts: expected one text with the same tokens for all models, got {lengths} tokens"
        )
    known = np.all([text != word for text, word in zip(texts, unknown, strict=True)], axis=0)
    candidates = 1 + np.flatnonzero(known[1:])
    if not 1 <= n <= len(candidates):
        raise ValueError(
            f"n: expected 1 to {len(candidates)} (positions with a known word), got {n}"
        )
    return sorted(np.random.default_rng(seed).choice(candidates, n, replace=False).tolist())
