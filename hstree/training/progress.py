"""What people see while a model trains: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from hstree.runs import EpochRecord, perplexity

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Reporter(Protocol):
    """Receives what happens in a run."""

    def message(self, text: str) -> None:
        """A line worth reading."""

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        """Training begins, or goes on after ``step`` steps."""

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        """An optimiser step of an epoch (counted from 1) has been made on ``tokens`` tokens."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch and its validation have ended."""

    def stop(self) -> None:
        """Training has ended, in whatever way."""


class _Meter:
    """Loss and speed, averaged over about the last twenty steps."""

    def __init__(self) -> None:
        self.loss = math.nan
        self._seconds_per_token = math.nan
        self._last = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / max(self._seconds_per_token, 1e-9)

    def update(self, loss: float, tokens: int) -> None:
        now = time.perf_counter()
        seconds, self._last = (now - self._last) / tokens, now
        if math.isnan(self.loss):
            self.loss, self._seconds_per_token = loss, seconds
        self.loss += 0.05 * (loss - self.loss)
        self._seconds_per_token += 0.05 * (seconds - self._seconds_per_token)

    def pause(self) -> None:
        self._last = time.perf_counter()

    def __str__(self) -> str:
        return (
            f"loss {self.loss:.3f}  perplexity {perplexity(self.loss):6.1f}  "
            f"{self.tokens_per_second:6,.0f} tokens/s"
        )


def _epoch_line(record: EpochRecord, epochs: int) -> str:
    return (
        f"epoch {record.epoch:>{len(str(epochs))}}/{epochs}  "
        f"perplexity train {record.train_perplexity:7.1f}  "
        f"valid {record.valid_perplexity:7.1f}  "
        f"{record.tokens_per_second:7,.0f} tokens/s  {record.seconds:5.1f} s"
        + ("  averaged" if record.averaged else "")
        + ("  best" if record.best else "")
    )


class Silent:
    """A reporter that says nothing."""

    def message(self, text: str) -> None:
        pass

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        pass

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        pass

    def epoch(self, record: EpochRecord) -> None:
        pass

    def stop(self) -> None:
        pass


class Reporters:
    """Several reporters that hear the same."""

    def __init__(self, reporters: Iterable[Reporter]) -> None:
        self._reporters = list(reporters)

    def add(self, reporter: Reporter) -> None:
        """One more, from now on."""
        self._reporters.append(reporter)

    def message(self, text: str) -> None:
        for reporter in self._reporters:
            reporter.message(text)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        for reporter in self._reporters:
            reporter.start(epochs, steps_per_epoch, step)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        for reporter in self._reporters:
            reporter.step(epoch, loss, tokens)

    def epoch(self, record: EpochRecord) -> None:
        for reporter in self._reporters:
            reporter.epoch(record)

    def stop(self) -> None:
        for reporter in self._reporters:
            reporter.stop()


class PlainLines:
    """One line each epoch, and one every ``interval`` seconds in between."""

    def __init__(self, interval: float = 10.0) -> None:
        self.interval = interval
        self._meter = _Meter()
        self._epochs = self._total = self._done = 0
        self._begin = self._spoke = 0.0

    def message(self, text: str) -> None:
        print(text, flush=True)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        self._epochs, self._total, self._done = epochs, epochs * steps_per_epoch - step, 0
        self._begin = self._spoke = time.perf_counter()
        self._meter.pause()

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self._done += 1
        self._meter.update(loss, tokens)
        now = time.perf_counter()
        if now - self._spoke >= self.interval:
            self._spoke = now
            left = (now - self._begin) / self._done * (self._total - self._done)
            print(f"epoch {epoch}/{self._epochs}  {self._meter}  {left:5.0f} s left", flush=True)

    def epoch(self, record: EpochRecord) -> None:
        print(_epoch_line(record, self._epochs), flush=True)
        self._spoke = time.perf_counter()
        self._meter.pause()

    def stop(self) -> None:
        pass


class ProgressBar:
    """A bar over all steps of the run, with loss, perplexity, tokens/s and the time left; a line
    above it each epoch."""

    def __init__(self) -> None:
        self._meter = _Meter()
        self._epochs = 0
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def message(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._epochs = epochs
        self._meter.pause()
        self._progress = Progress(
            TextColumn("epoch {task.fields[epoch]}/" + str(epochs)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[meter]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            expand=True,
        )
        self._task = self._progress.add_task(
            "train",
            total=epochs * steps_per_epoch,
            completed=step,
            epoch=1 + step // steps_per_epoch,
            meter="",
        )
        self._progress.start()

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self._meter.update(loss, tokens)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=1, epoch=epoch, meter=str(self._meter))

    def epoch(self, record: EpochRecord) -> None:
        self.message(_epoch_line(record, self._epochs))
        self._meter.pause()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def default_reporter() -> Reporter:
    """A progress bar if standard output is a terminal, else plain lines."""
    return ProgressBar() if sys.stdout.isatty() else PlainLines()
