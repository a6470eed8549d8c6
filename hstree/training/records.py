"""Figures of an epoch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


def perplexity(loss: float) -> float:
    """exp(loss), infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class EpochRecord:
    """Figures of an epoch; a line of metrics.jsonl. Losses are in nats per token, speeds include
    training only. ``averaged``: the validation loss is that of the averaged weights."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    valid_loss: float
    best: bool
    tokens_per_second: float
    seconds: float
    averaged: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The record with its perplexities; JSON-able."""
        return asdict(self) | {
            "train_perplexity": perplexity(self.train_loss),
            "valid_perplexity": perplexity(self.valid_loss),
        }
