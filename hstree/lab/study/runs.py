"""Run a study: the runs of a grid, one after another, each an ordinary run of hstree train.

The folder of a study contains the folders of its runs. In addition to the files of ``hstree
train``, each may have:

    rank.json
        the ranks of its log-probabilities, if the study computes them
    failed.txt
        why the training failed, if it did

The files in its folder say whether a run is finished, so a study can be stopped at any time and
resumes when it is run again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hstree._files import write_atomic
from hstree.lm.runs import UNGROUPED, RunResults, TrainConfig, choose_device, load_run, read_run
from hstree.lm.training import Reporter, TrainingError, TrainingMemoryError, resume, train

from ..rank import log_prob_rank
from .engine import locked, make_runs
from .file import RankSettings, Study, StudyError, StudyModel, run_name

RUNS, RANK, FAILURE = "runs", "rank.json", "failed.txt"


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run's log-probabilities: see :class:`hstree.lab.RankResult`."""

    press_rank: int
    effective_ranks: dict[float, int]


@dataclass(frozen=True)
class StudyRun:
    """The current state of a run of a study, whose folder may not exist yet.

    Attributes:
        state: "finished", "failed", "waiting", "interrupted" or "without ranks": trained, but the
            ranks of the study are missing.
        failure: why its training failed, or why memory ran out in this call, which leaves the run
            waiting or interrupted.
    """

    model: StudyModel
    seed: int
    path: Path
    state: str = "waiting"
    figures: RunResults | None = None  # None if there is no folder yet
    ranks: Ranks | None = None  # with the settings of the study
    failure: str | None = None

    @property
    def config(self) -> TrainConfig:
        return replace(self.model.config, seed=self.seed, run=str(self.path))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def title(self) -> str:
        return self.model.label

    @property
    def seconds(self) -> float:
        """The training time of its epochs so far."""
        return sum(epoch.seconds for epoch in self.figures.epochs) if self.figures else 0.0


def study_runs(study: Study, folder: Path) -> list[StudyRun]:
    """List the runs of a study from its folder: all models with the first seed, then all with the
    second, and so on, so that every model has an early result.

    Raises:
        StudyError: a run has settings other than those in the file, or its folder is not a run.
    """
    return [
        read_state(StudyRun(model, seed, folder / RUNS / run_name(model, seed)), study.rank)
        for seed in study.seeds
        for model in study.models
    ]


def run_study(
    study: Study,
    folder: Path,
    *,
    limit: int | None = None,
    reporter: Callable[[], Reporter] = Reporter,
    changed: Callable[[Sequence[StudyRun]], None] = lambda runs: None,
) -> list[StudyRun]:
    """Make the missing runs, resume the interrupted ones, and compute the missing ranks. A run
    whose training failed is not repeated as long as its folder exists. A run whose memory ran out
    is left as it was saved, and resumed by the next call. After an error, the same call continues
    with what was done.

    Args:
        study: result of :func:`read_study`.
        folder: folder of the study; created if needed.
        limit: largest number of runs to work on; None: all.
        reporter: function that makes a listener for each run.
        changed: function called with all runs at the beginning, whenever one ends, and on an
            interruption.

    Returns:
        The current state of all runs.

    Raises:
        StudyError: see :func:`study_runs`; a run cannot be made with its settings; or another
            process runs a study in the folder.
        OSError: a file cannot be written, such as on a full disk.
        StudyInterrupted: on Ctrl-C or SIGTERM.
    """

    def finish(runs: Sequence[StudyRun], number: int, listener: Reporter) -> list[StudyRun]:
        made = finish_run(runs[number], study.rank, listener)
        return [*runs[:number], made, *runs[number + 1 :]]

    folder.mkdir(parents=True, exist_ok=True)
    known = partial(study_runs, study, folder)
    with locked(folder):
        return make_runs(known, finish, limit=limit, reporter=reporter, changed=changed)


def finish_run(run: StudyRun, rank: RankSettings | None, reporter: Reporter) -> StudyRun:
    try:
        if run.state == "waiting":
            train(run.config, reporter)
        elif run.state == "interrupted":
            resume(run.path, reporter)
    except TrainingMemoryError as error:
        reporter.message(str(error))
        return replace(read_state(run, rank), failure=str(error))
    except TrainingError as error:
        reporter.message(f"failed: {error}")
        if not run.path.is_dir():
            return replace(run, state="failed", failure=str(error))
        write_atomic(run.path / FAILURE, f"{error}\n".encode())
    else:
        if rank is not None:
            reporter.message("computing the ranks of its log-probabilities ...")
            _take_ranks(run.path, rank)
    return read_state(run, rank)


def read_state(run: StudyRun, rank: RankSettings | None) -> StudyRun:
    """The current state of a run, from its folder. Raises StudyError unless the folder has the
    settings of the run, except for those that do not change the model."""
    if not run.path.exists():
        return run
    figures = read_run(run.path)
    expected = json.loads(run.config.with_absolute_paths().to_json())
    for name, value in expected.items():
        found = figures.settings[name]
        if (name == "seed" or name not in UNGROUPED) and found != value:
            raise StudyError(
                f"{run.path}: this run was made with {name} = {json.dumps(found)}, but the "
                f"file now has {json.dumps(value)}; choose another --output, or remove the folder "
                "of the run to repeat it"
            )
    ranks = None if rank is None else _read_ranks(run.path / RANK, rank)
    run = replace(run, state="interrupted", figures=figures, ranks=ranks)
    if figures.final is not None:
        ranked = rank is None or ranks is not None
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
    """The ranks written by :func:`_take_ranks`; None if there are none with these settings."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["settings"] != dataclasses.asdict(settings):
            return None
        ranks = {float(key): int(rank) for key, rank in values["effective_ranks"].items()}
        return Ranks(int(values["press_rank"]), ranks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
