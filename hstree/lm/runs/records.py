"""Figures of a run: the content of metrics.jsonl and summary.json."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from hstree.lm._messages import quoted

_Record = TypeVar("_Record")


def perplexity(loss: float) -> float:
    """exp(loss), infinity where that is too large for a float."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass(frozen=True)
class EpochRecord:
    """Figures of an epoch; a line of metrics.jsonl. Losses are in nats per token, speeds include
    training only. ``averaged``: the validation loss is that of the averaged weights. ``sampled``:
    the training loss is an estimate from sampled classes, too low on average."""

    epoch: int
    step: int
    learning_rate: float
    train_loss: float
    valid_loss: float
    best: bool
    tokens_per_second: float
    seconds: float
    averaged: bool = False
    sampled: bool = False

    @property
    def train_perplexity(self) -> float:
        """Per token."""
        return perplexity(self.train_loss)

    @property
    def valid_perplexity(self) -> float:
        """Per token."""
        return perplexity(self.valid_loss)

    def to_json(self) -> str:
        """A line with the figures, and with the perplexities, which :meth:`from_json` ignores."""
        perplexities = {
            "train_perplexity": self.train_perplexity,
            "valid_perplexity": self.valid_perplexity,
        }
        return json.dumps(asdict(self) | perplexities) + "\n"

    @classmethod
    def from_json(cls, text: str) -> EpochRecord:
        """Read what :meth:`to_json` wrote. Raises ValueError for anything else."""
        return read_record(cls, json_object(text))


@dataclass(frozen=True)
class HeadCost:
    """Median seconds of one forward and backward pass of the head, and of a flat softmax over the
    context vectors of the same N rows and V classes.

    Attributes:
        rows: N.
        head_seconds, flat_seconds: medians over alternating repetitions in the same process.
    """

    rows: int
    head_seconds: float
    flat_seconds: float

    @property
    def ratio(self) -> float:
        """Time of the flat softmax divided by the time of the head."""
        return self.flat_seconds / self.head_seconds


@dataclass(frozen=True)
class Summary:
    """Final figures of a run; summary.json. Perplexities are per token. ``valid_share``: the share
    of the validation text that the validation perplexity is of."""

    corpus: str
    head: str
    classes: int
    train_tokens: int
    epochs: int
    best_epoch: int
    valid_perplexity: float
    test_perplexity: float
    unigram_valid_perplexity: float
    unigram_test_perplexity: float
    backbone_parameters: int
    head_parameters: int
    cost: HeadCost
    seconds: float
    valid_share: float = 1.0

    @property
    def parameters(self) -> int:
        """Those of the backbone, and those of the head that it does not share."""
        return self.backbone_parameters + self.head_parameters

    @property
    def text(self) -> tuple[int, int, str]:
        """Identifies the corpus by its number of classes, its training tokens and the perplexity of
        the unigram model on the test text (six digits). Perplexities of different texts cannot be
        compared."""
        return self.classes, self.train_tokens, f"{self.unigram_test_perplexity:.6g}"

    def to_json(self) -> str:
        """The figures and the ratio of the costs as a JSON object, one line each."""
        values = asdict(self)
        values["cost"]["ratio"] = self.cost.ratio
        return json.dumps(values, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Summary:
        """What :meth:`to_json` wrote. Raises ValueError for anything else."""
        return read_record(cls, json_object(text))


def read_record(kind: type[_Record], values: Mapping[str, Any]) -> _Record:
    """A dataclass of this module from its fields; others are ignored. Raises ValueError if one
    without a default is missing, or has another type; a whole number is accepted as a float."""
    types = typing.get_type_hints(kind)
    named = [name for name in types if name in values or not hasattr(kind, name)]  # no default
    return kind(**{name: _value(name, types[name], values.get(name)) for name in named})


def _value(name: str, kind: type, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return read_record(kind, value)
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {name!r} to be {kind.__name__}, got {quoted(value)}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """The object of a JSON text. Raises ValueError if it is not an object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {text[:60]!r}")
    return value
