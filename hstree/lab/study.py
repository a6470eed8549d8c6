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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hstree._files import write_atomic, write_together
from hstree.heads import head_options
from hstree.lm.cli import count as whole
from hstree.lm.config import (
    UNGROUPED,
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
    csv_text,
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

from .comparison import cell, differing, spread
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
    head = "gss"
    learning_rate = 0.004         # any setting, in place of the one for all
    head_options = { c = [-1.5, 0.0], k = [1.5, 2.5] }

A list is a grid: softmax and four models of gss, each with three seeds.
"""
RUNS, RANK, FAILURE = "runs", "rank.json", "failed.txt"
OPEN = ("waiting", "interrupted", "without ranks")
"""States of unfinished runs; the other states are ``finished`` and ``failed``."""
_ELSEWHERE = ("run", "seed", "finetune", "head_option")  # a study sets these itself
_SETTINGS = tuple(f.name for f in dataclasses.fields(TrainConfig) if f.name not in _ELSEWHERE)


class StudyError(ValueError):
    """A study's file, or the folder of one of its runs, is invalid."""


class StudyInterrupted(KeyboardInterrupt):
    """A study was interrupted, by a signal of this number if it is known. It resumes when it is run
    again."""

    def __init__(self, message: str, signal: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal


@dataclass(frozen=True)
class RankSettings:
    """The matrix of log-probabilities for the ranks: the first ``rows`` contexts (None: all) of one
    split of the text."""

    rows: int | None = None
    split: str = "test"


@dataclass(frozen=True)
class Study:
    """A grid of configurations, the models, each trained once with each seed. The label of a model
    is its name in the file, followed by the values of the grid; seed and run folder of its settings
    are placeholders."""

    name: str
    models: Mapping[str, TrainConfig]  # by label, in the order of the file
    seeds: tuple[int, ...]
    baseline: str | None  # label of the model that the others are tested against
    rank: RankSettings | None  # None: no ranks
    source: str  # text of the file


# The file


def read_study(path: str | os.PathLike[str]) -> Study:
    """Read the study of a TOML file such as ``EXAMPLE``.

    In addition to the keys there, ``name`` names the study (default: the file's name). ``seeds``
    may be a single number (default: 1). The name of a model defaults to that of its head or preset.
    A list is a grid: one configuration for each element, and with several lists for each
    combination. Raises StudyError if the file is missing, is not TOML, or has an invalid key or
    value; the message names the file and the model.
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
    settings, tables = values.get("settings", {}), values.get("models")
    _expect("settings", "a table", settings, isinstance(settings, dict))
    listed = isinstance(tables, list) and tables != []
    _expect("models", "at least one table [[models]]", tables, listed)
    with _within("[settings]"):
        _only(settings, _SETTINGS)
    models: list[tuple[str, TrainConfig]] = []
    for number, each in enumerate(tables, start=1):
        kinds = [key for key in ("head", "preset") if isinstance(each, dict) and key in each]
        place = f"[[models]] number {number}"
        _expect(place, "a table with a head or a preset", each, len(kinds) == 1)
        model_name = _name(each.get("name", each[kinds[0]]))
        with _within(f"model {model_name!r}"):
            models += _models(model_name, each, settings)
    labels = [label for label, _ in models]
    folders = [run_name(label, 0).casefold() for label in labels]
    for label, folder in zip(labels, folders, strict=True):
        _expect("models", "different names", label, folders.count(folder) == 1)
    baseline = values.get("baseline")
    known = f"one of the models {shortened(', '.join(map(repr, labels)), 1000)}"
    _expect("baseline", known, baseline, baseline in (None, *labels))
    seeds, rank = _seeds(values.get("seeds", 1)), _rank(values.get("rank", False))
    return Study(_name(values.get("name", name)), dict(models), seeds, baseline, rank, source)


def run_name(label: str, seed: int) -> str:
    """The name of the folder of a run, such as ``gss-c=-1.5-k=2.5-seed=1``."""
    return re.sub(r"[^\w.=+-]+", "-", f"{label}-seed={seed}")


@contextmanager
def _within(place: object) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise StudyError(f"{place}: {error}") from None


def _expect(key: str, expected: str, value: Any, fits: bool) -> None:
    if not fits:
        raise StudyError(f"{key}: expected {expected}, got {quoted(value)}")


def _only(values: Iterable[str], known: Sequence[str]) -> None:
    for key in values:
        if key not in known:
            listed = f"{', '.join(known)}{meant(key, known)}"
            raise StudyError(f"unknown key {quoted(key)}, expected one of {listed}")


def _name(name: Any) -> str:
    usable = isinstance(name, str) and name.isprintable() and name.strip(" .") != ""
    _expect("name", "a valid name for a folder", name, usable and name == Path(name).name)
    return str(name)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else [value]
    different = seeds and all(type(s) is int for s in seeds) and len({*seeds}) == len(seeds)
    _expect("seeds", "different whole numbers", value, bool(different))
    with _within("seeds"):
        for seed in (min(seeds), max(seeds)):  # the limits are those of a range
            TrainConfig(seed=seed)
    return tuple(seeds)


def _rank(value: Any) -> RankSettings | None:
    _expect("rank", "true, false or a table", value, isinstance(value, (bool, dict)))
    given = value if isinstance(value, dict) else {}
    with _within("rank"):
        _only(given, ("rows", "split"))
    rank = RankSettings(**given)
    rows = rank.rows is None or (type(rank.rows) is int and rank.rows > 0)
    _expect("rank.rows", "a number of contexts", rank.rows, rows)
    splits = "train", "valid", "test"
    _expect("rank.split", "train, valid or test", rank.split, rank.split in splits)
    return None if value is False else rank


def _models(
    name: str, values: Mapping[str, Any], common: Mapping[str, Any]
) -> Iterator[tuple[str, TrainConfig]]:
    """One model for each combination of elements of the lists in settings and head options."""
    own = {key: v for key, v in values.items() if key not in ("name", "preset", "head_options")}
    _only(own, _SETTINGS)
    given, options = {**common, **own}, values.get("head_options", {})
    for chosen, chosen_options in itertools.product(_grid(given), _grid(options)):
        texts = tuple(f"{key}={json.dumps(value)}" for key, value in chosen_options.items())
        preset_name = values.get("preset")
        make = TrainConfig if preset_name is None else partial(preset, preset_name)
        config = make(**chosen, head_option=texts)
        check_text(preset_name, config)
        for key in {*chosen_options} - ({*head_options(config.head)} - {*_SETTINGS}):
            raise StudyError(f"head_options: the head {config.head!r} has no option {key}")
        label = [name]
        for listed, part in ((given, chosen), (options, chosen_options)):
            varied = {key: value for key, value in part.items() if isinstance(listed[key], list)}
            label += [
                f"{key}={value if isinstance(value, str) else json.dumps(value)}"
                for key, value in varied.items()
            ]
        yield ", ".join(label), config


def _grid(values: Any) -> list[dict[str, Any]]:
    """The values with every list replaced by one of its elements, for each combination."""
    table = isinstance(values, dict) and [] not in values.values()
    _expect("settings, head_options", "a table without an empty list", values, table)
    lists = [value if isinstance(value, list) else [value] for value in values.values()]
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*lists)]


# Runs


@dataclass(frozen=True)
class StudyRun:
    """The current state of a run of a study, whose folder may not exist yet."""

    label: str  # of its model
    config: TrainConfig
    path: Path
    state: str = "waiting"  # one of OPEN; without ranks: trained, but those of the study miss
    figures: RunResults | None = None  # None if there is no folder yet
    ranks: Mapping[str, Any] | None = None  # those in RANK, with the settings of the study
    failure: str | None = None  # why its training failed, or was stopped in this call


def study_runs(study: Study, folder: Path) -> list[StudyRun]:
    """List the runs of a study from its folder: all models with the first seed, then all with the
    second, and so on, so that every model has an early result. Raises StudyError if a run has
    settings other than those in the file, or its folder is not a run."""
    runs = []
    for seed, (label, config) in itertools.product(study.seeds, study.models.items()):
        path = folder / RUNS / run_name(label, seed)
        run = StudyRun(label, replace(config, seed=seed, run=str(path)), path)
        runs.append(_read_state(run, study.rank))
    return runs


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
        limit: largest number of runs to work on; None: all.
        reporter: function that makes a listener for each run.
        changed: function called with all runs at the beginning, whenever one ends, and on an
            interruption.

    Raises:
        StudyError: see ``study_runs``; a run cannot be made with its settings; or another
            process runs a study in the folder.
        OSError: a file cannot be written, such as on a full disk.
        StudyInterrupted: on Ctrl-C or SIGTERM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder), _resumable(study, folder, changed):
        runs = study_runs(study, folder)
        changed(runs)
        left = [number for number, run in enumerate(runs) if run.state in OPEN]
        for number in left[:limit]:
            run, listener = runs[number], reporter()
            listener.message(f"run {number + 1} of {len(runs)}: {run.path.name}")
            try:
                runs[number] = _finish(run, study.rank, listener)
            except StudyError:
                raise
            except ValueError as error:
                raise StudyError(f"model {run.label!r}: {error}") from error
            changed(runs)
    return runs


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
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
    study: Study, folder: Path, changed: Callable[[Sequence[StudyRun]], None]
) -> Iterator[None]:
    """A context that reports the state of all runs when it is left early, and says in
    interruptions and errors of writing how to continue."""
    try:
        yield
    except (KeyboardInterrupt, OSError, ValueError) as error:
        runs = study_runs(study, folder)
        with suppress(OSError):  # as before
            changed(runs)
        done = sum(run.state == "finished" for run in runs)
        kept = f"{done} of {len(runs)} runs are finished; run the same command to continue"
        if isinstance(error, KeyboardInterrupt):
            raise StudyInterrupted(kept, getattr(error, "signal", None)) from None
        if isinstance(error, OSError):
            raise OSError(f"{error}; {kept}") from error
        raise


def _finish(run: StudyRun, rank: RankSettings | None, reporter: Reporter) -> StudyRun:
    try:
        if run.state == "waiting":
            train(run.config, reporter)
        elif run.state == "interrupted":
            resume(run.path, reporter)
    except TrainingError as error:
        reporter.message(f"stopped: {error}")
        if run.path.is_dir() and not isinstance(error, TrainingMemoryError):
            write_atomic(run.path / FAILURE, f"{error}\n".encode())
        return replace(_read_state(run, rank), failure=str(error))
    if rank is not None:
        reporter.message("computing the ranks of its log-probabilities ...")
        _take_ranks(run.path, rank)
    return _read_state(run, rank)


def _read_state(run: StudyRun, rank: RankSettings | None) -> StudyRun:
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
    ranks, failure, state = None, None, "interrupted"
    if rank is not None and (run.path / RANK).is_file():
        with suppress(ValueError, KeyError, TypeError):  # as if there were none
            found = json.loads((run.path / RANK).read_text(encoding="utf-8"))
            ranks = found if found["settings"] == dataclasses.asdict(rank) else None
    if figures.final is not None:
        state = "finished" if rank is None or ranks is not None else "without ranks"
    elif (run.path / FAILURE).is_file():
        state, failure = "failed", (run.path / FAILURE).read_text(encoding="utf-8").strip()
    return replace(run, state=state, figures=figures, ranks=ranks, failure=failure)


def _take_ranks(path: Path, settings: RankSettings) -> None:
    run = load_run(path)
    run.model.to(choose_device(run.config.device))
    tokens = getattr(run.corpus(), settings.split)
    try:
        result = log_prob_rank(run.model, tokens, rows=settings.rows)
    except ValueError as error:
        raise StudyError(f"rank of {path.name}, {settings.split} text: {error}") from None
    values = {
        "settings": dataclasses.asdict(settings),
        "press_rank": result.press_rank,
        "effective_ranks": result.effective_ranks,
    }
    write_atomic(path / RANK, (json.dumps(values, indent=2) + "\n").encode())


# Results


def study_report(study: Study, runs: Sequence[StudyRun]) -> Report:
    """The table of the models, also in LaTeX, and a row for each run: model, head, seed, state, the
    settings and head options that differ between models, and the results."""
    models, appendix = study_table(study, runs), f"with\n\n```toml\n{study.source.strip()}\n```"
    files = {"study.tex": latex([models]).encode()}
    files["study.csv"] = csv_text(run_rows(study, runs)).encode()
    notes = [*_notes(study, runs)]
    return Report(study.name, [models], notes, files=files, appendix=appendix)


def study_table(study: Study, runs: Sequence[StudyRun]) -> Table:
    """A table with a row for each model: mean and standard deviation of the perplexities over its
    finished seeds, the p-value of Welch's test of those on the test text against the baseline,
    parameters, and medians over the seeds of the seconds per epoch and of the ranks."""
    every, rows = run_rows(study, runs), []

    def tests(label: str | None) -> tuple[list[float], set[Any]]:
        own = [run.figures for run in runs if run.label == label and run.figures]
        finals = [of.final for of in own if of.final]
        return [of.test_perplexity for of in finals], {of.text for of in finals}

    baseline, texts = tests(study.baseline)
    for label in study.models:
        own = [row for row in every if row["model"] == label]
        done = [row for row in own if row["test_perplexity"] is not None]
        seeds = f"{len(done)} of {len(own)}" if len(done) < len(own) else str(len(own))
        row = {"model": label, "seeds": seeds}
        for key in ("train", "valid", "test"):
            row[key] = spread(of[f"{key}_perplexity"] for of in done)
        if study.baseline is not None:
            values, of = tests(label)
            comparable = label != study.baseline and len(of | texts) == 1
            tested = comparable and min(len(values), len(baseline)) > 1
            row["p"] = probability(t_test(values, baseline).p_value) if tested else "-"
        row["parameters"] = count(done[0]["parameters"] if done else None)
        row["s per epoch"] = _median(done, "seconds_per_epoch", 1)
        if study.rank is not None:
            row["Press rank"] = _median(own, "press_rank", 0)
            for e in EPSILONS:
                row[f"rank, {e:g}"] = _median(own, f"effective_rank_{e:g}", 0)
        rows.append(row)
    title = f"{study.name}: perplexity, mean ± standard deviation over seeds"
    return row_table(title, [*rows[0]], [[*row.values()] for row in rows], None, str)


def _median(rows: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    known = [row[key] for row in rows if row[key] is not None]
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
    options = {label: parse_options(of.head_option) for label, of in study.models.items()}
    every = dict.fromkeys(name for given in options.values() for name in given)
    of_model = {}  # what differs between models: settings, then options of the head
    for label, config in study.models.items():
        settings = model_settings(config)
        settings = {k: v for k, v in settings.items() if k not in ("head", "head_option")}
        own = every | options[label]
        of_model[label] = settings | {f"option {k}": v for k, v in own.items()}
    differ, rows = differing(of_model.values()), []
    for run in runs:
        config, figures, ranks = run.config, run.figures, run.ranks
        row = {"model": run.label, "head": config.head, "seed": config.seed, "state": run.state}
        for name in differ:
            row[name.removeprefix("option ")] = cell(of_model[run.label].get(name))
        row["test_perplexity"] = figures and figures.test_perplexity
        row["valid_perplexity"] = figures and figures.valid_perplexity
        best = [e for e in figures.epochs if e.epoch == figures.best_epoch] if figures else []
        known = [epoch.train_perplexity for epoch in best if not epoch.sampled]
        row["train_perplexity"] = known[0] if known else None
        row["best_epoch"] = figures and figures.best_epoch
        final = figures and figures.final
        for name in ("backbone_parameters", "head_parameters", "parameters"):
            row[name] = final and getattr(final, name)
        row["seconds_per_epoch"] = figures and figures.seconds_per_epoch
        row["press_rank"] = ranks and ranks["press_rank"]
        for e in EPSILONS:
            row[f"effective_rank_{e:g}"] = ranks and ranks["effective_ranks"][str(e)]
        rows.append(row)
    return rows


# The command


def add_command(commands: Any) -> None:
    about = {"help": "a grid of runs in one table", "formatter_class": Paragraphs}
    example = f"example of a study:\n\n{EXAMPLE}"
    parser = commands.add_parser("study", description=__doc__, epilog=example, **about)
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
        cells = [(run.path.name, run.state) for run in study_runs(study, Path(output))]
        print_tables([row_table(f"{len(cells)} runs", ("run", "state"), cells, None)])
        return 0
    with output_folder(output) as folder:

        def write(runs: Sequence[StudyRun]) -> None:
            command = f"hstree study {Path(arguments.file).name}"
            write_together(folder, study_report(study, runs).content("study", command))

        options: Any = {"limit": arguments.limit, "reporter": ConsoleReporter, "changed": write}
        runs = run_study(study, folder, **options)
    report = study_report(study, runs)
    show()
    print_tables(report.tables, report.notes)
    print(fold(f"written to {folder}: study.md, study.tex, study.csv", sys.stdout))
    return 1 if any(run.failure is not None for run in runs) else 0
