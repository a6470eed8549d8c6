"""The loss of any head by the frequency of the words."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.models import LanguageModel, read_contexts


@dataclass(frozen=True)
class ClassLoss:
    """The loss of a model over a text, by the class that came next.

    Attributes:
        counts: int64 [V], how often each class came.
        losses: [V], sum of -log P over those times, in nats.
    """

    counts: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Loss in nats per token."""
        return float(self.losses.sum() / self.counts.sum())


@dataclass(frozen=True)
class FrequencyBin:
    """Words of similar frequency in the training text.

    Attributes:
        first, last: their ranks by frequency, the most frequent word 1.
        most, least: occurrences of the first and of the last in the training text.
        tokens: occurrences of all of them in the text that was read.
        loss: sum of -log P over these, in nats.
    """

    first: int
    last: int
    most: int
    least: int
    tokens: int
    loss: float

    @property
    def mean(self) -> float:
        """Loss in nats per token of the bin; nan without one."""
        return self.loss / self.tokens if self.tokens else float("nan")

    @property
    def label(self) -> str:
        """The ranks in words."""
        return f"{self.first:,}-{self.last:,}" if self.last > self.first else f"{self.first:,}"


@torch.no_grad()
def class_losses(model: LanguageModel, tokens: Any) -> ClassLoss:
    """The loss of a model with any head over a text, which is read as one stream.

    Args:
        model: any language model.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.

    Raises:
        ValueError: fewer than 2 tokens.
    """
    n_classes = model.head.n_classes
    counts, losses = np.zeros(n_classes, np.int64), np.zeros(n_classes)
    for hidden, target in read_contexts(model, tokens):
        log_prob = model.head(hidden, target).output.double().cpu().numpy()
        classes = target.cpu().numpy()
        counts += np.bincount(classes, minlength=n_classes)
        losses -= np.bincount(classes, log_prob, minlength=n_classes)
    return ClassLoss(counts, losses)


def frequency_bins(found: ClassLoss, frequencies: npt.ArrayLike) -> tuple[FrequencyBin, ...]:
    """The loss by rank of the word's frequency: 1-10, 11-30, 31-100, 101-300 and so on to V. The
    bins together hold the whole loss.

    Args:
        found: of :func:`class_losses`.
        frequencies: int [V], occurrences in the training text; classes of equal frequency are
            ranked by their number.

    Raises:
        ValueError: frequencies of another number of classes.
    """
    counts = np.asarray(frequencies, np.int64)
    if counts.shape != found.counts.shape:
        raise ValueError(
            f"frequencies: expected {len(found.counts)}, one for each class, got {counts.shape}"
        )
    order = np.argsort(-counts, kind="stable")
    limits = [0]
    for limit in itertools.chain.from_iterable((10**k, 3 * 10**k) for k in itertools.count(1)):
        limits.append(min(limit, len(counts)))
        if limit >= len(counts):
            break
    return tuple(
        FrequencyBin(
            first=begin + 1,
            last=end,
            most=int(counts[order[begin]]),
            least=int(counts[order[end - 1]]),
            tokens=int(found.counts[order[begin:end]].sum()),
            loss=float(found.losses[order[begin:end]].sum()),
        )
        for begin, end in itertools.pairwise(limits)
    )
