"""The engine of all studies: it makes the runs that are missing, one after another."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hstree._progress import duration
from hstree.lm.runs.folder import lock_folder
from hstree.lm.training import Reporter

from .file import StudyError, by_key

OPEN = ("waiting", "interrupted", "without ranks")
"""States of unfinished runs; the other states are ``finished`` and ``failed``."""


class Run(Protocol):
    """What the engine knows of a run: ``name``, the name of its folder; ``model``, the same object
    for all seeds; ``title``, the name of the model in messages; its ``state``; and ``seconds``, the
    time of training so far."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Any: ...

    @property
    def title(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def seconds(self) -> float: ...


AnyRun = TypeVar("AnyRun", bound=Run)


class StudyInterrupted(KeyboardInterrupt):
    """A study was interrupted, by a signal of this number if it is known. It resumes when it is run
    again."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


def make_runs(
    known: Callable[[], list[AnyRun]],
    finish: Callable[[Sequence[AnyRun], int, Reporter], list[AnyRun]],
    *,
    limit: int | None = None,
    reporter: Callable[[], Reporter] = Reporter,
    changed: Callable[[Sequence[AnyRun]], None] = lambda runs: None,
) -> list[AnyRun]:
    """Finish the open runs of a study, each at most once. ``known``: all runs known so far, in the
    order in which they are made. ``finish``: makes or resumes the run of this number, and returns
    all runs afterwards. For the other arguments and errors, see :func:`run_study`."""
    tried: set[str] = set()
    with _resumable(known, changed):
        runs = known()
        changed(runs)
        while limit is None or len(tried) < limit:
            left = (n for n, run in enumerate(runs) if run.state in OPEN and run.name not in tried)
            number = next(left, None)
            if number is None:
                break
            run, listener, seconds = runs[number], reporter(), seconds_left(runs)
            tried.add(run.name)
            time = f", about {duration(seconds)} of training left" if seconds else ""
            listener.message(f"run {number + 1} of {len(runs)}: {run.name}{time}")
            try:
                runs = finish(runs, number, listener)
            except StudyError:
                raise
            except ValueError as error:
                raise StudyError(f"model {run.title!r}: {by_key(error)}") from error
            changed(runs)
    return runs


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise StudyError(f"{folder}: another process runs a study in this folder") from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


@contextmanager
def _resumable(
    known: Callable[[], list[AnyRun]], changed: Callable[[Sequence[AnyRun]], None]
) -> Iterator[None]:
    """A context that reports the state of all runs when it is left early, and says in
    interruptions and errors of writing how to continue."""
    try:
        yield
    except (KeyboardInterrupt, OSError, ValueError) as error:
        runs = known()
        with suppress(OSError):  # as before
            changed(runs)
        done = sum(run.state == "finished" for run in runs)
        kept = f"{done} of {len(runs)} runs are finished; run the same command to continue"
        if isinstance(error, KeyboardInterrupt):
            raise StudyInterrupted(kept, getattr(error, "signal", None)) from None
        if isinstance(error, OSError):
            raise OSError(f"{error}; {kept}") from error
        raise


def seconds_left(runs: Sequence[Run]) -> float | None:
    """Estimated seconds of training left: a run takes the mean time of the finished runs of its
    model, or of all finished runs. None if no run has finished."""
    finished = [run for run in runs if run.state in ("finished", "without ranks")]
    if not finished:
        return None
    left = 0.0
    for run in runs:
        if run.state in ("waiting", "interrupted"):
            same = [other.seconds for other in finished if other.model is run.model]
            expected = statistics.fmean(same or [other.seconds for other in finished])
            left += max(0.0, expected - run.seconds)
    return left
