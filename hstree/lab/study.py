"""Studies: a grid of training runs, described by a TOML file, and their results in one table.

Trains models (heads, settings, seeds) and collects the results: study.md and study.tex have a row
for each model, with mean and standard deviation of the perplexities over the seeds, p-value against
a baseline, parameters, seconds per epoch, and ranks of the log-probabilities; study.csv has a row
for each run. The tables are updated after every run. The folder of a study has the folders of its
runs, whose files say whether they are finished; beside those of hstree train, rank.json has the
ranks of a run, and failed.txt why its training failed. After an interruption the same command
resumes the study. Runs that have finished or failed are skipped; to repeat one, remove its folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hstree._files import write_atomic, write_together
from hstree._progress import duration
from hstree.heads import head_options
from hstree.lm.cli import count as whole
from hstree.lm.config import (
    UNGROUPED,
    ConfigError,
    TrainConfig,
    check_text,
    choose_device,
    parse_options,
    preset,
)
from hstree.lm.report import (
    ConsoleReporter,
    Reporter,
    Table,
    count,
    decimals,
    fold,
    latex,
    meant,
    optional_package,
    print_tables,
    probability,
    quoted,
    shortened,
    show,
)
from hstree.lm.run import RunResults, load_run, lock_folder, model_settings, read_run
from hstree.lm.train import TrainingError, TrainingMemoryError, resume, train

from .comparison import spread
from .rank import EPSILONS, log_prob_rank
from .report import Paragraphs, Report, output_folder, row_table
from .significance import t_test

EXAMPLE = """\
    seeds = [1, 2, 3]
    baseline = "softmax"          # t-tests against this model
    rank = true                   # or {rows = 4000, split = "test"}

    [settings]                    # any setting of hstree train, for all models
    data = "ptb"
    epochs = 3

    [[models]]
    head = "softmax"              # or a preset: preset = "ptb-softmax"

    [[models]]
    name = "shape"
    head = "gss"
    learning_rate = 0.004         # any setting, in place of the one for all
    head_options = { c = [-1.5, 0.0], k = [1.5, 2.5] }

A list is a grid: this study has softmax and four models of gss, each with three
seeds.
"""
_SETTINGS = tuple(field.name for field in dataclasses.fields(TrainConfig))
_SPLITS = ("train", "valid", "test")
_ELSEWHERE = {
    "run": "folders are named after the models",
    "seed": "set seeds, which apply to all models",
    "finetune": "a study trains its models from scratch",
    "head_option": "set the options of a head in head_options",
}


class StudyError(ValueError):
    """A study's file, or the folder of one of its runs, is invalid."""


@dataclass(frozen=True)
class RankSettings:
    """The matrix of log-probabilities for the ranks: the first ``rows`` contexts (None: all) of one
    split of the text."""

    rows: int | None = None
    split: str = "test"


@dataclass(frozen=True)
class StudyModel:
    """One configuration, trained once with each seed: the name of the model in the file, followed
    by the values of the grid, and its settings, whose seed and run folder are placeholders."""

    label: str
    config: TrainConfig

    @property
    def options(self) -> dict[str, Any]:
        return parse_options(self.config.head_option)


@dataclass(frozen=True)
class Study:
    name: str
    models: tuple[StudyModel, ...]  # in the order of the file
    seeds: tuple[int, ...]
    baseline: str | None  # label of the model that the others are tested against
    rank: RankSettings | None  # None: no ranks
    source: str  # text of the file


def read_study(path: str | os.PathLike[str]) -> Study:
    """Read the study of a TOML file such as ``EXAMPLE``.

    In addition to the keys there, ``name`` names the study (default: the file's name). ``seeds``
    may be a single number (default: 1). The name of a model defaults to that of its head or preset.
    A list is a grid: one configuration for each element, and with several lists for each
    combination.

    Raises:
        StudyError: the file is missing, is not TOML, or has an invalid key or value; the message
            names the file, the model and the key.
    """
    file = Path(path)
    with _within(file):
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise StudyError("expected UTF-8 text") from None
        except OSError as error:
            raise StudyError(error.strerror) from None
        return parse_study(source, file.stem)


def parse_study(source: str, name: str = "study") -> Study:
    """Parse a study like :func:`read_study`, from a TOML text; ``name``: the default name."""
    module = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    toml = optional_package(module, "hstree study", "lm")
    try:
        values = toml.loads(source)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError, or a number of many digits
        raise StudyError(f"not TOML: {error}") from None
    _only(values, ("name", "seeds", "baseline", "rank", "settings", "models"))
    settings = _table(values, "settings")
    with _within("[settings]"):
        _only_settings(settings)
    tables = values.get("models")
    if not isinstance(tables, list) or not tables:
        raise StudyError(f"models: expected at least one table [[models]], got {quoted(tables)}")
    models: list[StudyModel] = []
    for number, each in enumerate(tables, start=1):
        with _within(f"[[models]] number {number}"):
            model_name = _model_name(each)
        with _within(f"model {model_name!r}"):
            models += _models(model_name, each, settings)
    folders = [run_name(model, 0).casefold() for model in models]
    number_of = Counter(folders)
    for model, folder in zip(models, folders, strict=True):
        if number_of[folder] > 1:
            raise StudyError(f"models: expected different names, got {quoted(model.label)}")
    baseline, labels = values.get("baseline"), [model.label for model in models]
    if baseline is not None and baseline not in labels:
        known = shortened(", ".join(map(repr, labels)), 1000)
        raise StudyError(f"baseline: expected one of the models {known}, got {quoted(baseline)}")
    return Study(
        _name(values, name),
        tuple(models),
        _seeds(values.get("seeds", 1)),
        baseline,
        _rank(values.get("rank", False)),
        source,
    )


def run_name(model: StudyModel, seed: int) -> str:
    """The name of the folder of a run, such as ``gss-c=-1.5-k=2.5-seed=1``."""
    return re.sub(r"[^\w.=+-]+", "-", f"{model.label}-seed={seed}")


def by_key(error: Exception) -> str:
    """The message of an error, with keys of the file in place of flags."""

    def key(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name not in (*_SETTINGS, "preset"):
            return match[0]
        return "head_options" if name == "head_option" else name

    return re.sub(r"--([a-z]+(?:-[a-z]+)*)", key, str(error))


# Parts of the file


@contextmanager
def _within(place: object) -> Iterator[None]:
    """Prefix errors with the place, and replace flags in them by keys of the file."""
    try:
        yield
    except ValueError as error:
        text = error if isinstance(error, StudyError) else by_key(error)
        raise StudyError(f"{place}: {text}") from None


def _name(values: Mapping[str, Any], default: str) -> str:
    name = values.get("name", default)
    usable = isinstance(name, str) and name.isprintable() and name.strip(" .") != ""
    if not usable or name != Path(name).name:
        raise StudyError(f"name: expected a valid name for a folder, got {quoted(name)}")
    return str(name)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [value]
    if not seeds or any(type(seed) is not int for seed in seeds) or len({*seeds}) < len(seeds):
        raise StudyError(f"seeds: expected different whole numbers, got {quoted(value)}")
    try:
        for seed in (min(seeds), max(seeds)):  # the limits are those of a range
            TrainConfig(seed=seed)
        return tuple(seeds)
    except ConfigError as error:
        raise StudyError(by_key(error).replace("seed:", "seeds:", 1)) from None


def _rank(value: Any) -> RankSettings | None:
    if isinstance(value, bool):
        return RankSettings() if value else None
    if not isinstance(value, dict):
        expected = "true, false or a table of rows and split"
        raise StudyError(f"rank: expected {expected}, got {quoted(value)}")
    with _within("rank"):
        _only(value, ("rows", "split"))
    rank = RankSettings(**value)
    if rank.rows is not None and (type(rank.rows) is not int or rank.rows < 1):
        raise StudyError(f"rank.rows: expected a number of contexts, got {quoted(rank.rows)}")
    if rank.split not in _SPLITS:
        raise StudyError(
            f"rank.split: expected one of {', '.join(_SPLITS)}, got {quoted(rank.split)}"
        )
    return rank


def _model_name(values: Any) -> str:
    if not isinstance(values, dict):
        raise StudyError(f"expected a table, got {quoted(values)}")
    kinds = [key for key in ("head", "preset") if key in values]
    if len(kinds) != 1 or not isinstance(values[kinds[0]], str):
        raise StudyError(
            f"expected the name of a head or of a preset, got {', '.join(kinds) or 'neither'}"
        )
    return _name(values, values[kinds[0]])


def _models(
    name: str, values: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[StudyModel]:
    """One model for each combination of elements of the lists in settings and head options."""
    own = {key: v for key, v in values.items() if key not in ("name", "preset", "head_options")}
    _only_settings(own)
    given = {**common, **own}
    options = _table(values, "head_options")
    for chosen, chosen_options in itertools.product(_grid(given), _grid(options)):
        config = _config(values.get("preset"), chosen, chosen_options)
        label = [name]
        for listed, part in ((given, chosen), (options, chosen_options)):
            for key, value in part.items():
                if isinstance(listed[key], list):
                    text = value if isinstance(value, str) else json.dumps(value)
                    label.append(f"{key}={text}")
        yield StudyModel(", ".join(label), config)


def _grid(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values with every list replaced by one of its elements, for each combination."""
    for key, value in values.items():
        if value == []:
            raise StudyError(f"{key}: expected at least one value, got []")
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


def _config(
    preset_name: str | None, settings: Mapping[str, Any], options: Mapping[str, Any]
) -> TrainConfig:
    texts = []
    for key, value in options.items():
        try:
            texts.append(f"{key}={json.dumps(value)}")
        except TypeError:  # dates and times
            raise StudyError(
                f"head_options: {key}: expected a number, text, table or list, got {value}"
            ) from None
    make = TrainConfig if preset_name is None else partial(preset, preset_name)
    config = make(**settings, head_option=tuple(texts))
    check_text(preset_name, config)
    known = head_options(config.head).difference(_SETTINGS)
    for key in options:
        if key not in known:
            raise StudyError(f"head_options: the head {config.head!r} has no option {key}")
    return config


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise StudyError(f"{key}: expected a table, got {quoted(table)}")
    return table


def _only(values: Iterable[str], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            listed = f"{', '.join(known)}{meant(key, known)}"
            raise StudyError(f"unknown key {quoted(key)}, expected one of {listed}")


def _only_settings(values: Iterable[str]) -> None:
    for key in values:
        if key in _ELSEWHERE:
            raise StudyError(f"{key}: cannot be set in a study: {_ELSEWHERE[key]}")
    _only(values, _SETTINGS)


# Runs

OPEN = ("waiting", "interrupted", "without ranks")
"""States of unfinished runs; the other states are ``finished`` and ``failed``."""


class StudyInterrupted(KeyboardInterrupt):
    """A study was interrupted, by a signal of this number if it is known. It resumes when it is run
    again."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


def make_runs(
    known: Callable[[], list[Any]],
    finish: Callable[[Sequence[Any], int, Reporter], list[Any]],
    *,
    limit: int | None = None,
    reporter: Callable[[], Reporter] = Reporter,
    changed: Callable[[Sequence[Any]], None] = lambda runs: None,
) -> list[Any]:
    """Finish the open runs of a study, each at most once. ``known``: all runs known so far, in the
    order in which they are made, with a ``name``, the same ``model`` for all seeds, a ``title`` for
    messages, a ``state``, and the ``seconds`` of training so far. ``finish``: makes or resumes the
    run of this number, and returns all runs afterwards. For the rest, see :func:`run_study`."""
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
    known: Callable[[], list[Any]], changed: Callable[[Sequence[Any]], None]
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


def seconds_left(runs: Sequence[Any]) -> float | None:
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
    """Make the missing runs, resume the interrupted ones, compute the missing ranks, and return the
    state of all runs. A run whose training failed is not repeated as long as its folder exists. A
    run whose memory ran out is left as it was saved, and resumed by the next call. After an error,
    the same call continues with what was done.

    Args:
        study, folder: result of :func:`read_study`; folder of the study, created if needed.
        limit: largest number of runs to work on; None: all.
        reporter: function that makes a listener for each run.
        changed: function called with all runs at the beginning, whenever one ends, and on an
            interruption.

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


# Results


def study_report(study: Study, runs: Sequence[StudyRun]) -> Report:
    """The table of the models, also in LaTeX, and a row for each run: model, head, seed, state, the
    settings and head options that differ between models, and the results."""
    models, appendix = study_table(study, runs), f"with\n\n```toml\n{study.source.strip()}\n```"
    files, rows = {"study.tex": latex([models]).encode()}, run_rows(study, runs)
    notes = [*_notes(study, runs)]
    return Report(study.name, [models], notes, rows=rows, files=files, appendix=appendix)


def study_table(study: Study, runs: Sequence[StudyRun]) -> Table:
    """A table with a row for each model: mean and standard deviation of the perplexities over its
    finished seeds, the p-value of Welch's test of those on the test text against the baseline,
    parameters, and medians over the seeds of the seconds per epoch and of the ranks."""
    every, rows = run_rows(study, runs), []
    texts = {run.name: run.figures.final.text for run in runs if run.figures and run.figures.final}

    def tests(label: str) -> tuple[list[float], set[Any]]:
        own = [run for run in runs if run.model.label == label and run.name in texts]
        values = [run.figures.test_perplexity for run in own if run.figures]
        return [value for value in values if value is not None], {texts[run.name] for run in own}

    for model in study.models:
        own = [row for row in every if row["model"] == model.label]
        done = [row for row in own if row["test_perplexity"] is not None]
        seeds = f"{len(done)} of {len(own)}" if len(done) < len(own) else str(len(own))
        row = {"model": model.label, "seeds": seeds}
        for key in ("train", "valid", "test"):
            row[key] = spread(of[f"{key}_perplexity"] for of in done)
        if study.baseline is not None:
            row["p"], (first, of), (second, others) = "-", tests(model.label), tests(study.baseline)
            if model.label != study.baseline and len(of | others) == 1 < min(
                len(first), len(second)
            ):
                row["p"] = probability(t_test(first, second).p_value)
        row["parameters"] = count(done[0]["parameters"] if done else None)
        row["s per epoch"] = _median([of["seconds_per_epoch"] for of in done], 1)
        if study.rank is not None:
            row["Press rank"] = _median([of["press_rank"] for of in own], 0)
            for e in EPSILONS:
                row[f"rank, {e:g}"] = _median([of[f"effective_rank_{e:g}"] for of in own], 0)
        rows.append(row)
    title = f"{study.name}: perplexity, mean ± standard deviation over seeds"
    return row_table(title, [*rows[0]], [[*row.values()] for row in rows], None, str)


def _median(values: Iterable[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    return decimals(digits)(statistics.median(known) if known else None)


def _notes(study: Study, runs: Sequence[StudyRun]) -> Iterator[str]:
    figures = [run.figures for run in runs if run.figures]
    finals = [of.final for of in figures if of.final]
    if finals:
        yield (
            "train: mean over the best epoch, with dropout and while the weights change, so it may "
            "exceed valid; valid and test: of the weights kept after that epoch, without dropout"
        )
    sampled = {of.head for of in figures if any(epoch.sampled for epoch in of.epochs)}
    if sampled:
        heads = ", ".join(sorted(sampled))
        why = "it is estimated from sampled classes, too low on average"
        yield f"no training perplexity of {heads}: {why}"
    if study.baseline is not None:
        against = f"Welch's t-test of the test perplexities against {study.baseline}"
        yield f"p: {against}, two-sided, not corrected for the number of models"
    if study.rank is not None:
        rows = "all" if study.rank.rows is None else f"the first {study.rank.rows:,}"
        where = f"{rows} contexts of the {study.rank.split} text"
        ranks = "Press rank and effective ranks (rank, epsilon) of the log-probabilities"
        yield f"{ranks} in {where}; like the seconds of an epoch, medians over seeds"
    unfinished = sum(run.state not in ("finished", "failed") for run in runs)
    if unfinished:
        yield f"{unfinished} of {len(runs)} runs have not finished"
    for run in runs:
        if run.failure is not None:
            ended = "failed" if run.state == "failed" else "was stopped"
            yield f"{run.path.name} {ended}: {run.failure}"
    if len({final.text for final in finals}) > 1:
        yield "the runs differ in text or vocabulary: their perplexities are not comparable"


def run_rows(study: Study, runs: Sequence[StudyRun]) -> list[dict[str, Any]]:
    """A row for each run in full precision. The training perplexity is that during the best epoch,
    None before the first epoch has ended, and where it is an estimate from sampled classes."""
    options = dict.fromkeys(name for model in study.models for name in model.options)
    of_model = {}
    for m in study.models:
        settings = model_settings(m.config)
        settings = {k: v for k, v in settings.items() if k not in ("head", "head_option")}
        of_model[m.label] = settings | {f"option {k}": v for k, v in (options | m.options).items()}
    names = dict.fromkeys(name for values in of_model.values() for name in values)
    differ = {n: len({json.dumps(v[n]) for v in of_model.values() if n in v}) > 1 for n in names}
    rows = []
    for run in runs:
        label, figures, ranks = run.model.label, run.figures, run.ranks
        final = figures and figures.final
        row = {"model": label, "head": run.model.config.head, "seed": run.seed, "state": run.state}
        for name in (n for n in names if differ[n]):
            value = of_model[label].get(name)
            structured = isinstance(value, (bool, list, tuple, dict))
            row[name.removeprefix("option ")] = json.dumps(value) if structured else value
        row["test_perplexity"] = figures and figures.test_perplexity
        row["valid_perplexity"] = figures and figures.valid_perplexity
        best = [e for e in figures.epochs if e.epoch == figures.best_epoch] if figures else []
        known = [epoch.train_perplexity for epoch in best if not epoch.sampled]
        row |= {"train_perplexity": known[0] if known else None}
        row["best_epoch"] = figures and figures.best_epoch
        for name in ("backbone_parameters", "head_parameters", "parameters"):
            row[name] = final and getattr(final, name)
        row["seconds_per_epoch"] = figures and figures.seconds_per_epoch
        row["press_rank"] = ranks and ranks.press_rank
        for e in EPSILONS:
            row[f"effective_rank_{e:g}"] = ranks and ranks.effective_ranks.get(e)
        rows.append(row)
    return rows


# The command

_LISTED = 1000  # runs in a table; a longer one would take minutes


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "study",
        help="a grid of runs in one table",
        description=__doc__,
        epilog=f"example of a study:\n\n{EXAMPLE}",
        formatter_class=Paragraphs,
    )
    parser.add_argument("file", metavar="FILE", help="the study, a TOML file; see below")
    output = "folder for the runs and tables (default: studies/NAME)"
    parser.add_argument("--output", metavar="FOLDER", help=output)
    parser.add_argument("--limit", type=whole, metavar="N", help="stop after N more runs")
    listed = "list the runs and their states, and exit"
    parser.add_argument("--dry-run", action="store_true", help=listed)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("hstree study: expected a single process, got one started by torchrun")
    study = read_study(arguments.file)
    output = arguments.output or str(Path("studies", study.name))
    if arguments.dry_run:
        list_runs(study_runs(study, Path(output)))
        return 0
    with output_folder(output) as folder:

        def write(runs: Sequence[StudyRun]) -> None:
            command = f"hstree study {Path(arguments.file).name}"
            write_together(folder, study_report(study, runs).content("study", command))

        runs = run_study(
            study, folder, limit=arguments.limit, reporter=ConsoleReporter, changed=write
        )
    report = study_report(study, runs)
    show()
    print_tables(report.tables, report.notes)
    print(fold(f"written to {folder}: study.md, study.tex, study.csv", sys.stdout))
    return 1 if any(run.failure is not None for run in runs) else 0


def list_runs(runs: Sequence[Any]) -> None:
    left = seconds_left(runs)
    notes = [f"about {duration(left)} of training left"] if left else []
    if len(runs) > _LISTED:
        states = Counter(run.state for run in runs[_LISTED:])
        rest = ", ".join(f"{count:,} {state}" for state, count in states.items())
        notes.insert(0, f"and {len(runs) - _LISTED:,} more runs: {rest}")
    cells = [(run.name, run.state) for run in runs[:_LISTED]]
    print_tables([row_table(f"{len(runs)} runs", ("run", "state"), cells, None)], notes)
