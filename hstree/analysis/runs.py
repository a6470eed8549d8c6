"""The figures of a training run, read from its folder: config.json, metrics.jsonl, summary.json.

A run that has not finished has no summary.json; its figures are those of the epochs that ended.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CONFIG, METRICS, SUMMARY = "config.json", "metrics.jsonl", "summary.json"

# Settings that do not make two runs different models.
UNGROUPED = ("run", "seed", "device", "threads", "save_interval", "tensorboard", "compile")

_Kind = TypeVar("_Kind", int, float, str)


class RunError(ValueError):
    """A folder that is not a run, or a file in it that cannot be read."""


@dataclass(frozen=True)
class EpochFigures:
    """An epoch: its number from 1, the validation perplexity after it, how long it took with its
    validation, training tokens per second, and whether averaged weights were validated."""

    epoch: int
    valid_perplexity: float
    seconds: float
    tokens_per_second: float
    averaged: bool


@dataclass(frozen=True)
class FinalFigures:
    """What summary.json adds, once a run has finished.

    ``text``: what tells one corpus from another: number of classes, of training tokens, and the
    unigram model's perplexity on the test text (six digits). Perplexities of different texts cannot
    be compared.
    """

    best_epoch: int
    valid_perplexity: float
    test_perplexity: float
    backbone_parameters: int
    head_parameters: int
    text: tuple[int, int, str]


@dataclass(frozen=True)
class RunFigures:
    """A run.

    Attributes:
        path: its folder, as it was named.
        settings: config.json, with defaults for what it does not hold.
        epochs: the epochs that ended, in order.
        final: None if the run has not finished.
        origin: of a run that was fine-tuned from another, the settings of that one as JSON, without
            its folder and seed; the name of its folder if that is gone; None for other runs.
    """

    path: Path
    settings: Mapping[str, Any]
    epochs: tuple[EpochFigures, ...]
    final: FinalFigures | None
    origin: str | None = None

    @property
    def head(self) -> str:
        """Registered name of the output layer."""
        return str(self.settings["head"])

    @property
    def seed(self) -> int | None:
        """The seed, None if the settings have none."""
        return self.settings.get("seed")

    @property
    def best(self) -> EpochFigures | None:
        """The epoch of the least validation perplexity; None if no epoch has ended."""
        return min(self.epochs, key=lambda epoch: epoch.valid_perplexity, default=None)

    @property
    def best_epoch(self) -> int | None:
        """Number of the best epoch."""
        if self.final is not None:
            return self.final.best_epoch
        return None if self.best is None else self.best.epoch

    @property
    def valid_perplexity(self) -> float | None:
        """Validation perplexity per token after the best epoch."""
        if self.final is not None:
            return self.final.valid_perplexity
        return None if self.best is None else self.best.valid_perplexity

    @property
    def test_perplexity(self) -> float | None:
        """Test perplexity per token of the best epoch's weights; None if the run has not
        finished."""
        return None if self.final is None else self.final.test_perplexity

    @property
    def seconds_per_epoch(self) -> float | None:
        """Median over the epochs, training and validation."""
        return statistics.median(e.seconds for e in self.epochs) if self.epochs else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the epochs, training only."""
        return statistics.median(e.tokens_per_second for e in self.epochs) if self.epochs else None

    def compared_settings(self) -> dict[str, Any]:
        """The settings that two runs of a group must share: all but :data:`UNGROUPED`; instead of
        the run from which this one was fine-tuned, that run's settings."""
        settings = {k: v for k, v in self.settings.items() if k not in UNGROUPED}
        if self.origin is not None:
            settings["finetune"] = self.origin
        return settings


def read_run(path: str | os.PathLike[str], defaults: Mapping[str, Any] | None = None) -> RunFigures:
    """Read the figures of a run folder; neither weights nor vocabulary are opened.

    Args:
        path: the folder.
        defaults: values of settings that config.json does not hold, as it may be older than they.

    Raises:
        RunError: there is no such folder, it holds no config.json, or one of the files is not what
            ``hstree train`` writes.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such run folder")
    settings = _read_settings(folder, defaults)
    return RunFigures(
        folder, settings, _read_epochs(folder), _read_final(folder), _origin(settings, defaults)
    )


def _read_settings(folder: Path, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    if not (folder / CONFIG).is_file():
        inside = any(folder.glob(f"*/{CONFIG}"))
        hint = "; its subfolders are runs: name these" if inside else ""
        raise RunError(f"{folder}: not a run folder: {CONFIG} missing{hint}")
    settings = {**(defaults or {}), **_read_object(folder / CONFIG)}
    _get(settings, "head", str, folder / CONFIG)
    if settings.get("seed") is not None:
        _get(settings, "seed", int, folder / CONFIG)
    return settings


def _read_epochs(folder: Path) -> tuple[EpochFigures, ...]:
    path = folder / METRICS
    if not path.is_file():
        return ()
    epochs = []
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        where = f"{path}, line {number}"
        record = _object(line, where)
        epochs.append(
            EpochFigures(
                _get(record, "epoch", int, where),
                _get(record, "valid_perplexity", float, where),
                _get(record, "seconds", float, where),
                _get(record, "tokens_per_second", float, where),
                record.get("averaged") is True,
            )
        )
    return tuple(epochs)


def _read_final(folder: Path) -> FinalFigures | None:
    path = folder / SUMMARY
    if not path.is_file():
        return None
    summary = _read_object(path)
    unigram = _get(summary, "unigram_test_perplexity", float, path)
    return FinalFigures(
        _get(summary, "best_epoch", int, path),
        _get(summary, "valid_perplexity", float, path),
        _get(summary, "test_perplexity", float, path),
        _get(summary, "backbone_parameters", int, path),
        _get(summary, "head_parameters", int, path),
        (
            _get(summary, "classes", int, path),
            _get(summary, "train_tokens", int, path),
            f"{unigram:.6g}",
        ),
    )


def _origin(settings: Mapping[str, Any], defaults: Mapping[str, Any] | None) -> str | None:
    """See :attr:`RunFigures.origin`; of a chain of fine-tuned runs, the settings of all."""
    chain: list[Any] = []
    seen: set[str] = set()
    name = settings.get("finetune")
    while isinstance(name, str) and name not in seen:
        seen.add(name)
        try:
            settings = _read_settings(Path(name), defaults)
        except RunError:
            chain.append(name)
            break
        chain.append({k: v for k, v in settings.items() if k not in (*UNGROUPED, "finetune")})
        name = settings.get("finetune")
    return json.dumps(chain, sort_keys=True) if chain else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RunError(f"{path}: expected UTF-8 text") from None


def _read_object(path: Path) -> dict[str, Any]:
    return _object(_read_text(path), path)


def _object(text: str, where: object) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise RunError(f"{where}: expected a JSON object, got {text[:60]!r}")
    return value


def _get(values: Mapping[str, Any], key: str, kind: type[_Kind], where: object) -> _Kind:
    """The value of a key, which must be of this type (a whole number may stand for a float)."""
    value = values.get(key)
    if kind is float and type(value) is int:
        return kind(value)
    if type(value) is not kind:
        raise RunError(f"{where}: expected {key!r} to be {kind.__name__}, got {value!r}")
    return value
