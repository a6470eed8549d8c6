"""Planned studies: their plan is written in Python, and may choose settings by sweeps.

A study has contenders; the rates of each are swept first, then seeds follow at the best one. Its
records, one line for each finished run in JSON, lie in one file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hstree._files import write_atomic, write_together
from hstree.lab.comparison import spread
from hstree.lab.report import Report, provenance, row_table
from hstree.lab.study import StudyInterrupted, list_runs, make_runs
from hstree.lm.cli import count
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.report import ConsoleReporter, Reporter, Table

Settings = Mapping[str, Any]


def key(settings: Settings, seed: int) -> str:
    """Identifies a run: equal settings and seed are the same run, whatever its name."""
    return json.dumps([dict(settings), seed], sort_keys=True)


class Records:
    """The finished runs of a study, kept in one file, so that the study can go on another day or on
    another machine. A record holds the name of the contender, its settings, the seed, the text, the
    figures, and what :func:`hstree.lab.report.provenance` says; all records of a file are about the
    same text. The file may not exist yet. Raises ValueError if it is not a list of records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: dict[str, dict[str, Any]] = {}
        self._read(path)

    def __len__(self) -> int:
        return len(self._runs)

    def figures(self, settings: Settings, seed: int) -> dict[str, Any] | None:
        record = self._runs.get(key(settings, seed))
        return None if record is None else record["figures"]

    def all(self) -> list[dict[str, Any]]:
        return sorted(self._runs.values(), key=lambda r: (r["name"], key(r["settings"], r["seed"])))

    def add(
        self, name: str, settings: Settings, seed: int, text: str, figures: Mapping[str, Any]
    ) -> None:
        """Add a finished run, and write the file. Runs that another process has added meanwhile are
        kept. Raises ValueError if the records are about another text."""
        record = {"name": name, "settings": dict(settings), "seed": seed}
        record |= {"text": text, "figures": dict(figures), **provenance()}
        self.check_text(text)
        self._read(self.path)
        self._runs[key(settings, seed)] = json.loads(json.dumps(record))
        self._write()

    def merge(self, paths: Iterable[Path]) -> None:
        """Add the records of other files, and write the file. A run that is in both keeps its
        record in this file."""
        own = dict(self._runs)
        for path in paths:
            if not path.is_file():
                raise ValueError(f"{path}: no such file")
            self._read(path)
        self._runs |= own
        self._write()

    def check_text(self, text: str) -> None:
        for record in self._runs.values():
            if record["text"] != text:
                raise ValueError(
                    f"{self.path}: expected the text {record['text']!r} as before, got {text!r}"
                )

    def _read(self, path: Path) -> None:
        if not path.is_file():
            return
        try:
            records = json.loads(path.read_text(encoding="utf-8"))
            found = {key(record["settings"], record["seed"]): record for record in records}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: expected a list of records: {error!r}") from None
        for record in found.values():
            self.check_text(record["text"])
        self._runs |= found

    def _write(self) -> None:
        lines = ",\n".join(json.dumps(record) for record in self.all())
        write_atomic(self.path, f"[\n{lines}\n]\n".encode())


SMALLEST_SHARE, LARGEST_SHARE = 1 / 64, 64.0
"""A sweep goes on beyond its values, but not further than these multiples of them."""


@dataclass(frozen=True)
class Contender:
    """One configuration of a planned study, by name on the command line and by title on the page.

    Attributes:
        sweeps: settings to be chosen, with the values to begin with, each after the one before. A
            value is added beyond the best one, twice or half as large, until the best value lies
            between others.
        like: name of a contender whose chosen values it takes over, instead of sweeps.
        final: settings of the runs after the sweeps that differ, such as their length.
        seeds: number of seeds, 1, 2, ..., with the chosen values.
        group: 0 for what decides most; the runs of a group precede those of the next.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    sweeps: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    like: str | None = None
    final: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = 3
    group: int = 0


@dataclass(frozen=True)
class PlannedRun:
    """A run of a contender; ``figures``: its results, None if it has not finished."""

    model: Contender
    settings: Mapping[str, Any]
    seed: int
    figures: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """For a folder: the contender, the values of its sweeps, and the seed."""
        keys = [*self.model.sweeps, *self.model.final]
        parts = [f"{key}={_text(self.settings[key])}" for key in keys if key in self.settings]
        return "-".join([self.model.name, *parts, f"seed={self.seed}"])

    @property
    def title(self) -> str:
        """What its contender is."""
        return self.model.title

    @property
    def state(self) -> str:
        return "waiting" if self.figures is None else "finished"

    @property
    def seconds(self) -> float:
        """The time of its training, as far as it is known."""
        return 0.0 if self.figures is None else self.figures.get("seconds", 0.0)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ",".join(map(str, value))


@dataclass(frozen=True)
class State:
    """How far a contender is: for each sweep its tried values with their validation perplexities;
    its runs as far as they are known, those of sweeps first; the settings of the final runs, None
    while a sweep goes on; while the last sweep goes on, the settings with its best value so far, if
    its runs are as long as the final ones."""

    tried: dict[str, dict[float, float]]
    runs: tuple[PlannedRun, ...]
    settings: Mapping[str, Any] | None
    so_far: Mapping[str, Any] | None = None


def state(contender: Contender, contenders: Sequence[Contender], records: Records) -> State:
    """The tried values of a contender, its runs and its final settings."""
    settings = dict(contender.settings)
    tried: dict[str, dict[float, float]] = {}
    runs: list[PlannedRun] = []

    def add(chosen: Mapping[str, Any], seed: int) -> PlannedRun:
        runs.append(PlannedRun(contender, chosen, seed, records.figures(chosen, seed)))
        return runs[-1]

    if contender.like is not None:
        model = named(contenders, contender.like)
        found = state(model, contenders, records)
        if found.settings is None:
            return State(tried, found.runs, None)
        settings |= {key: found.settings[key] for key in model.sweeps}
    for name, values in contender.sweeps.items():
        tried[name] = {}
        wanted = list(values)
        while wanted:
            complete = True
            for value in wanted:
                figures = add(settings | {name: value}, 1).figures
                complete &= figures is not None
                if figures is not None:
                    diverged = figures["valid"] is None
                    tried[name][value] = math.inf if diverged else figures["valid"]
            if not complete:
                comparable = name == list(contender.sweeps)[-1] and not contender.final
                so_far = settings | {name: _best(tried[name])} if tried[name] else None
                return State(tried, tuple(runs), None, so_far if comparable else None)
            wanted = _beyond(tried[name], values)
        settings[name] = _best(tried[name])
    settings |= contender.final
    for seed in range(1, contender.seeds + 1):
        add(settings, seed)
    return State(tried, tuple(runs), settings)


def _best(tried: Mapping[float, float]) -> float:
    return min(tried, key=tried.__getitem__)


def _beyond(tried: Mapping[float, float], values: Sequence[float]) -> list[float]:
    """The next value of a sweep if the best one is the smallest or the largest of several."""
    if len(values) == 1:
        return []
    best = _best(tried)
    if best == max(tried) and 2 * best <= LARGEST_SHARE * max(values):
        return [2 * best]
    if best == min(tried) and best / 2 >= SMALLEST_SHARE * min(values):
        return [best / 2]
    return []


def planned_runs(
    contenders: Sequence[Contender], records: Records, only: Collection[str] = ()
) -> list[PlannedRun]:
    """The runs of a study as far as they are known, in the order in which they are made: within a
    group all sweeps, then the first seed of every contender, then the second. ``only``: names of
    the contenders that count; empty: all."""
    counted = [named(contenders, name) for name in only] or list(contenders)
    runs: dict[str, PlannedRun] = {}
    for group in sorted({contender.group for contender in counted}):
        states = [state(c, contenders, records) for c in counted if c.group == group]
        swept = [run for found in states if found.settings is None for run in found.runs]
        later = [run for found in states if found.settings is not None for run in found.runs]
        for run in [*swept, *sorted(later, key=lambda run: run.seed)]:
            runs.setdefault(key(run.settings, run.seed), run)
    return list(runs.values())


def named(contenders: Iterable[Contender], name: str) -> Contender:
    by_name = {contender.name: contender for contender in contenders}
    if name not in by_name:
        raise ValueError(f"expected one of {', '.join(by_name)}, got {name!r}")
    return by_name[name]


@dataclass(frozen=True)
class Result:
    """The finished runs of a contender with its chosen settings: the figures of each finished seed,
    at least one, and whether the sweeps are finished, so that the settings are ``chosen``."""

    contender: Contender
    settings: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]
    chosen: bool = True

    @property
    def title(self) -> str:
        return self.contender.title + ("" if self.chosen else " (sweep not finished)")

    def mean(self, figure: str) -> float | None:
        """Mean of a figure over the seeds; None if a run has none."""
        values = [run.get(figure) for run in self.runs]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None

    def spread(self, figure: str, digits: int = 1) -> str:
        """Mean ± standard deviation of a figure over the seeds, as text."""
        if self.mean(figure) is None:
            return "diverged"
        return spread([run[figure] for run in self.runs], digits)


def results(contenders: Sequence[Contender], records: Records) -> list[Result]:
    """The contenders with at least one finished run, in order: after their sweeps, or with the best
    value so far."""
    found = []
    for contender in contenders:
        at = state(contender, contenders, records)
        settings = at.settings or at.so_far
        if settings is None:
            continue
        seeds = range(1, contender.seeds + 1)
        runs = [records.figures(settings, seed) for seed in seeds]
        finished = [run for run in runs if run is not None]
        if finished:
            found.append(Result(contender, settings, finished, at.settings is not None))
    return found


def sweep_table(contenders: Sequence[Contender], records: Records) -> Table:
    rows = []
    for contender in contenders:
        for name, tried in state(contender, contenders, records).tried.items():
            values = ", ".join(f"{value:g}: {tried[value]:.1f}" for value in sorted(tried))
            if values:
                rows.append((contender.title, name.replace("_", " "), values))
    title = "Validation perplexity of the first seed by the value of a setting"
    return row_table(title, ("head", "setting", "value: perplexity"), rows, None)


@dataclass(frozen=True)
class PlannedStudy:
    """A study that a script plans. Its files are NAME.json, NAME.md and the pictures.

    Attributes:
        contenders: in the order of importance.
        measure: makes a run on a text, given the command line too, and returns its figures; among
            them ``valid``, the validation perplexity, None if training diverged.
        report: tables and pictures of the records.
        commands: the command lines that make it.
        load: reads the text of ``--data``.
        time_steps: times training steps for the page, given the text and the records; None: there
            is no ``--times``.
        devices: devices that ``measure`` can run on, the default first; it reads ``--device``.
    """

    name: str
    contenders: Sequence[Contender]
    measure: Callable[[PlannedRun, Corpus, argparse.Namespace], dict[str, Any]]
    report: Callable[[Sequence[Contender], Records], Report]
    commands: Sequence[str]
    load: Callable[[Path], Corpus] = load_corpus
    time_steps: Callable[[Corpus, Records], None] | None = None
    devices: Sequence[str] = ("cpu",)

    def files(self, records: Records) -> dict[str, Any]:
        report = self.report(self.contenders, records)
        return report.content(records.path.stem, "\n".join(self.commands))

    def main(
        self, description: str | None, folder: Path, arguments: Sequence[str] | None = None
    ) -> None:
        """The script, with its records in ``folder`` by default."""
        parser = self._parser(description, folder)
        given = parser.parse_args(arguments)
        records = Records(given.save.with_suffix(".json"))
        if given.merge:
            records.merge(given.merge)
        known = partial(planned_runs, self.contenders, records, given.only)
        if given.dry_run:
            list_runs(known())
            return

        def write(runs: Sequence[PlannedRun] = ()) -> None:
            write_together(records.path.parent, self.files(records))

        if given.times or not (given.merge or given.page):
            if given.data is None:
                parser.error("expected --data")
            corpus = self.load(given.data)
            if given.times and self.time_steps is not None:
                self.time_steps(corpus, records)
            else:
                text = text_name(corpus)
                records.check_text(text)

                def finish(
                    runs: Sequence[PlannedRun], number: int, reporter: Reporter
                ) -> list[PlannedRun]:
                    run = runs[number]
                    figures = self.measure(run, corpus, given)
                    records.add(run.model.name, run.settings, run.seed, text, figures)
                    return known()

                listen, limit = ConsoleReporter, given.limit
                try:
                    make_runs(known, finish, limit=limit, reporter=listen, changed=write)
                except StudyInterrupted as interruption:
                    sys.exit(str(interruption))
        write()

    def _parser(self, description: str | None, folder: Path) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawTextHelpFormatter
        )
        names = [contender.name for contender in self.contenders]
        add = parser.add_argument
        shown = "contenders to run (default: all that are missing)\n" + ", ".join(names)
        times = "time training steps in turns, and exit" if self.time_steps else argparse.SUPPRESS
        add("--data", type=Path, metavar="FOLDER", help="folder of the text")
        add("--only", nargs="+", metavar="NAME", choices=names, default=[], help=shown)
        add("--limit", type=count, metavar="N", help="stop after N more runs")
        if len(self.devices) > 1:
            text = "device of the runs (default: %(default)s)"
            add("--device", choices=self.devices, default=self.devices[0], help=text)
        for name, metavar, default, text in (
            ("runs", "FOLDER", Path("studies", self.name), "folder for run folders"),
            (
                "save",
                "NAME",
                folder / self.name,
                "NAME.json keeps the records; NAME.md is the page",
            ),
        ):
            text += " (default: %(default)s)"
            add(f"--{name}", type=Path, metavar=metavar, default=default, help=text)
        add("--merge", nargs="+", type=Path, metavar="FILE", help="add records of other machines")
        add("--dry-run", action="store_true", help="list the runs and their states, and exit")
        add("--page", action="store_true", help="make the page from the records, and exit")
        add("--times", action="store_true", help=times)
        return parser


def text_name(corpus: Corpus) -> str:
    """Identifies a text in records: the number of training tokens and classes, and the perplexity
    of the unigram distribution on the test part."""
    unigram = math.exp(corpus.statistics().unigram_loss(corpus.test[1:]))
    return (
        f"{len(corpus.train):,} training tokens, {len(corpus.vocabulary):,} classes, "
        f"unigram test perplexity {unigram:.4g}"
    )
