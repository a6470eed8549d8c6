"""The figures of a run, read from its folder without weights or vocabulary.

A run that has not finished has no summary.json; its figures are those of the finished epochs.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from .config import HEAD_SETTINGS, UNGROUPED, TrainConfig, unread
from .names import METRICS, SUMMARY, CheckpointError
from .reader import load_config
from .records import EpochRecord, Summary

_Record = TypeVar("_Record")


@dataclass(frozen=True)
class RunResults:
    """A run: its folder, as it was given, its settings, and the finished epochs, in order.

    Attributes:
        final: None if the run has not finished.
        origin: for a run that was fine-tuned from another, the settings of that run as JSON,
            without its folder and seed, or the name of its folder if that no longer exists; None
            for other runs.
    """

    path: Path
    config: TrainConfig
    epochs: tuple[EpochRecord, ...]
    final: Summary | None
    origin: str | None = None

    @property
    def head(self) -> str:
        """Registered name of the output layer."""
        return self.config.head

    @property
    def seed(self) -> int:
        """Seed of the trees, the initial weights and dropout."""
        return self.config.seed

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings as in config.json."""
        return _settings(self.config)

    @property
    def best(self) -> EpochRecord | None:
        """The epoch with the lowest validation perplexity; None if no epoch has finished."""
        return min(self.epochs, key=lambda epoch: epoch.valid_loss, default=None)

    @property
    def best_epoch(self) -> int | None:
        """Number of the best epoch."""
        if self.final is not None:
            return self.final.best_epoch
        return None if self.best is None else self.best.epoch

    @property
    def valid_perplexity(self) -> float | None:
        """Validation perplexity per token after the best epoch."""
        kept = self.final or self.best
        return None if kept is None else kept.valid_perplexity

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
        """The settings that two runs of a group must share: ``model_settings``; instead of the
        run from which this one was fine-tuned, that run's settings."""
        settings = model_settings(self.config)
        if self.origin is not None:
            settings["finetune"] = self.origin
        return settings


def read_run(path: str | os.PathLike[str]) -> RunResults:
    """Read the figures of a run folder.

    Raises:
        CheckpointError: the folder or its config.json does not exist, or one of the files was not
            written by ``hstree train``.
    """
    folder = Path(path)
    config = load_config(folder)
    return RunResults(folder, config, read_epochs(folder), _read_final(folder), _origin(config))


def counterpart(run: RunResults, head: str) -> RunResults | None:
    """The newest finished run next to ``run``, in the same folder, that has another head and
    otherwise the same settings (those of the head and :data:`~hstree.lm.runs.UNGROUPED` ones but
    the seed aside) on the same text. None if there is no such run."""
    found: list[tuple[float, RunResults]] = []
    for file in run.path.absolute().parent.glob(f"*/{SUMMARY}"):
        with suppress(CheckpointError, OSError):
            other = read_run(run.path.parent / file.parent.name)
            fits = other.head == head and _comparable(other) == _comparable(run)
            if fits and run.final and other.final and other.final.text == run.final.text:
                found.append((file.stat().st_mtime, other))
    return max(found, key=itemgetter(0))[1] if found else None


def _comparable(run: RunResults) -> dict[str, Any]:
    settings = {k: v for k, v in run.compared_settings().items() if k not in HEAD_SETTINGS}
    return settings | {"seed": run.seed}


def model_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that make a model, as in config.json: all but :data:`~hstree.lm.runs.UNGROUPED`
    and those that its head does not read."""
    left_out = {*UNGROUPED, *unread(config.head)}
    return {name: value for name, value in _settings(config).items() if name not in left_out}


def read_epochs(folder: Path) -> tuple[EpochRecord, ...]:
    """The finished epochs of a run folder. Raises CheckpointError, which names the line, for a line
    that is not the record of an epoch."""
    path = folder / METRICS
    if not path.is_file():
        return ()
    return tuple(
        _parsed(EpochRecord.from_json, line, f"{path}, line {number}")
        for number, line in enumerate(_text(path).splitlines(), start=1)
    )


def _read_final(folder: Path) -> Summary | None:
    path = folder / SUMMARY
    return _parsed(Summary.from_json, _text(path), str(path)) if path.is_file() else None


def _origin(config: TrainConfig) -> str | None:
    """See :attr:`RunResults.origin`; for a chain of fine-tuned runs, the settings of all of
    them."""
    chain: list[Any] = []
    seen: set[str] = set()
    name = config.finetune
    while name is not None and name not in seen:
        seen.add(name)
        try:
            config = load_config(name)
        except CheckpointError:
            chain.append(name)
            break
        chain.append({k: v for k, v in model_settings(config).items() if k != "finetune"})
        name = config.finetune
    return json.dumps(chain, sort_keys=True) if chain else None


def _settings(config: TrainConfig) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config.to_json())
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: expected UTF-8 text") from None


def _parsed(parse: Callable[[str], _Record], text: str, where: str) -> _Record:
    try:
        return parse(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
