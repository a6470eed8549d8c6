"""A study: the runs of a grid, one after the other, each an ordinary run of hstree train.

The folder of a study holds the folders of its runs, and in each of them, beside what ``hstree
train`` writes:

    rank.json     the ranks of its log-probabilities, where the study asks for them
    failed.txt    why the training ended early, if it did

A run is known to be done by what lies in its folder, so a study can be stopped at any time and goes
on when it is run again.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hstree._files import write_atomic
from hstree._progress import duration
from hstree.runs import UNGROUPED, RunFigures, TrainConfig, choose_device, load_run, read_run
from hstree.training import Reporter, Silent, TrainingError, TrainingInterrupted, resume, train

from ..rank.compute import log_prob_rank
from .file import RankSettings, Study, StudyError, StudyModel, by_key, run_name

RUNS, RANK, FAILURE = "runs", "rank.json", "failed.txt"
OPEN = ("waiting", "interrupted", "without ranks")
"""States of runs with work left to do; the others are ``finished`` and ``failed``."""


class StudyInterrupted(KeyboardInterrupt):
    """A study was interrupted; run again, it goes on.

    Attributes:
        signal: number of the signal that came, or None.
    """

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run's log-probabilities: see :class:`hstree.laboratory.RankResult`."""

    press_rank: int
    effective_ranks: dict[float, int]


@dataclass(frozen=True)
class StudyRun:
    """A run of a study as it is now.

    Attributes:
        model: which configuration.
        seed: with which seed.
        path: its folder, which may not be there yet.
        state: "finished", "failed" or one of :data:`OPEN`; "without ranks": trained, but the study
            asks for ranks.
        figures: None as long as there is no folder.
        ranks: None if there are none, or those of other settings.
        failure: why its training ended early.
    """

    model: StudyModel
    seed: int
    path: Path
    state: str = "waiting"
    figures: RunFigures | None = None
    ranks: Ranks | None = None
    failure: str | None = None

    @property
    def config(self) -> TrainConfig:
        """All its settings."""
        return replace(self.model.config, seed=self.seed, run=str(self.path))

    @property
    def seconds(self) -> float:
        """What its epochs have taken so far."""
        return sum(epoch.seconds for epoch in self.figures.epochs) if self.figures else 0.0


def study_runs(study: Study, folder: Path) -> list[StudyRun]:
    """The runs of a study as they are in its folder: all models with the first seed, then all with
    the second, and so on, so that every model has a result early.

    Raises:
        StudyError: a run has other settings than the file says by now, or its folder is not one.
    """
    return [
        _read(study, StudyRun(model, seed, folder / RUNS / run_name(model, seed)))
        for seed in study.seeds
        for model in study.models
    ]


def run_study(
    study: Study,
    folder: Path,
    *,
    limit: int | None = None,
    reporter: Callable[[], Reporter] = Silent,
    changed: Callable[[Sequence[StudyRun]], None] = lambda runs: None,
) -> list[StudyRun]:
    """Make the runs that are not there yet, go on with those that were interrupted, take the ranks
    that are missing. A run whose training fails is not tried again while its folder is there.

    Args:
        study: of :func:`read_study`.
        folder: of the study; made if it is not there.
        limit: number of runs to work on at most; None: all.
        reporter: makes a listener for each run.
        changed: called with all runs at the beginning, whenever one has ended, and on an
            interruption.

    Returns:
        All runs as they are now.

    Raises:
        StudyError: as :func:`study_runs`, or a run cannot be made with the settings it has; those
            that have ended are kept.
        StudyInterrupted: on Ctrl-C or SIGTERM.
    """
    runs = study_runs(study, folder)
    changed(runs)
    for number in [number for number, run in enumerate(runs) if run.state in OPEN][:limit]:
        run, listener, left = runs[number], reporter(), seconds_left(runs)
        time = "" if left is None else f", about {duration(left)} of training left"
        listener.message(f"run {number + 1} of {len(runs)}: {run.path.name}{time}")
        try:
            runs[number] = _finish(study, run, listener)
        except (KeyboardInterrupt, ValueError) as error:
            runs = study_runs(study, folder)
            changed(runs)
            if isinstance(error, KeyboardInterrupt):
                done = sum(run.state == "finished" for run in runs)
                raise StudyInterrupted(
                    f"{done} of {len(runs)} runs are finished; repeat the command to resume",
                    error.signal if isinstance(error, TrainingInterrupted) else None,
                ) from None
            if isinstance(error, StudyError):
                raise
            raise StudyError(f"model {run.model.label!r}: {by_key(error)}") from error
        changed(runs)
    return runs


def seconds_left(runs: Sequence[StudyRun]) -> float | None:
    """Estimated seconds of training that remain: a run takes as long as the finished ones of its
    model on average, or as all finished ones. None if none has finished."""
    finished = [run for run in runs if run.figures is not None and run.figures.final is not None]
    if not finished:
        return None
    left = 0.0
    for run in runs:
        if run.state in ("waiting", "interrupted"):
            same = [other.seconds for other in finished if other.model is run.model]
            expected = statistics.fmean(same or [other.seconds for other in finished])
            left += max(0.0, expected - run.seconds)
    return left


def _finish(study: Study, run: StudyRun, reporter: Reporter) -> StudyRun:
    """The run, trained to its end and with its ranks."""
    try:
        if run.state == "waiting":
            train(run.config, reporter)
        elif run.state == "interrupted":
            resume(run.path, reporter)
    except TrainingError as error:
        reporter.message(f"failed: {error}")
        if not run.path.is_dir():
            return replace(run, state="failed", failure=str(error))
        write_atomic(run.path / FAILURE, f"{error}\n".encode())
    else:
        if study.rank is not None:
            reporter.message("computing the ranks of its log-probabilities ...")
            _take_ranks(run.path, study.rank)
    return _read(study, run)


def _read(study: Study, run: StudyRun) -> StudyRun:
    """The run by what lies in its folder now. Raises StudyError unless that has the settings of the
    run; those that make no other model aside."""
    if not run.path.exists():
        return run
    figures = read_run(run.path)
    expected = json.loads(run.config.with_absolute_paths().to_json())
    for name, value in expected.items():
        found = figures.settings[name]
        if (name == "seed" or name not in UNGROUPED) and found != value:
            raise StudyError(
                f"{run.path}: this run was made with {name} = {json.dumps(found)}, and the "
                f"file now says {json.dumps(value)}; name another --output, or remove the folder "
                "of the run to make it again"
            )
    ranks = None if study.rank is None else _read_ranks(run.path / RANK, study.rank)
    run = replace(run, state="interrupted", figures=figures, ranks=ranks)
    if figures.final is not None:
        ranked = study.rank is None or ranks is not None
        return replace(run, state="finished" if ranked else "without ranks")
    if (run.path / FAILURE).is_file():
        failure = (run.path / FAILURE).read_text(encoding="utf-8").strip()
        return replace(run, state="failed", failure=failure)
    return run


def _take_ranks(path: Path, settings: RankSettings) -> None:
    run = load_run(path)
    run.model.to(choose_device(run.config.device))
    tokens = getattr(run.corpus(), settings.split)
    if settings.rows is not None and settings.rows > len(tokens):
        raise StudyError(
            f"rank.rows: expected at most {len(tokens):,}, the contexts of the {settings.split} "
            f"text of {path.name}, got {settings.rows:,}"
        )
    result = log_prob_rank(run.model, tokens, rows=settings.rows)
    values = {
        "settings": dataclasses.asdict(settings),
        "press_rank": result.press_rank,
        "effective_ranks": result.effective_ranks,
    }
    write_atomic(path / RANK, (json.dumps(values, indent=2) + "\n").encode())


def _read_ranks(path: Path, settings: RankSettings) -> Ranks | None:
    """What :func:`_take_ranks` wrote; None if that was nothing, or for other settings."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["settings"] != dataclasses.asdict(settings):
            return None
        ranks = {float(key): int(rank) for key, rank in values["effective_ranks"].items()}
        return Ranks(int(values["press_rank"]), ranks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
