"""What a run tells those who follow it: messages, steps and epochs."""

from __future__ import annotations

import math
import sys
import time
from contextlib import ExitStack

from hstree._progress import Task
from hstree.lm._progress import shown
from hstree.lm._terminal import fold
from hstree.lm.runs import EpochRecord, perplexity


class Reporter:
    """Receives what happens in a run; this one prints nothing."""

    def message(self, text: str) -> None:
        """A message of one or more lines."""

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        """Training begins, or resumes after ``step`` steps."""

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        """An optimizer step of an epoch (counted from 1) has been made on ``tokens`` tokens."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch and its validation have ended."""

    def stop(self) -> None:
        """Training has ended, in whatever way."""


class _Meter:
    """Loss and speed, averaged over about twenty steps."""

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
        return f"perplexity {perplexity(self.loss):.1f}  {self.tokens_per_second:,.0f} tokens/s"


class ConsoleReporter(Reporter):
    """Prints messages and a line for each epoch on standard output, and shows progress with the
    time left on standard error."""

    def __init__(self) -> None:
        self._meter = _Meter()
        self._epochs = 0
        self._task: Task | None = None
        self._progress = ExitStack()

    def message(self, text: str) -> None:
        for line in text.splitlines():
            print(fold(line, sys.stdout), flush=True)

    def start(self, epochs: int, steps_per_epoch: int, step: int = 0) -> None:
        self._epochs = epochs
        self._meter.pause()
        self._progress.enter_context(shown())
        self._task = Task(f"epoch 1/{epochs}", epochs * steps_per_epoch, step)
        self._progress.callback(self._task.close)

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        assert self._task is not None
        self._meter.update(loss, tokens)
        self._task.description = f"epoch {epoch}/{self._epochs}"
        self._task.note = str(self._meter)
        self._task.advance()

    def epoch(self, record: EpochRecord) -> None:
        train = f"{'~' if record.sampled else ''}{record.train_perplexity:.1f}"
        print(
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}  perplexity "
            f"train {train:>7}  valid {record.valid_perplexity:7.1f}  "
            f"{record.seconds:5.1f} s"
            + ("  averaged" if record.averaged else "")
            + ("  best" if record.best else ""),
            flush=True,
        )
        self._meter.pause()

    def stop(self) -> None:
        self._progress.close()
