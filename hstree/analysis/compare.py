"""Runs side by side: what they differ in, and means over seeds.

Runs whose settings differ in the seed alone form a group. Only finished runs count in its means,
since an unfinished one has no test perplexity.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .runs import RunFigures, read_run
from .table import Table, count, csv_text, decimals, markdown, table, text


@dataclass(frozen=True)
class Statistic:
    """Mean of n values and their standard deviation with n - 1 in the denominator: nan if n is 1 or
    a value is not finite."""

    n: int
    mean: float
    deviation: float


def mean_and_deviation(values: Sequence[float]) -> Statistic | None:
    """Mean and sample standard deviation; None of no values."""
    n = len(values)
    if n == 0:
        return None
    if not all(map(math.isfinite, values)):
        return Statistic(n, sum(values) / n, math.nan)
    deviation = statistics.stdev(values) if n > 1 else math.nan
    return Statistic(n, statistics.fmean(values), deviation)


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ in the seed alone.

    Attributes:
        label: A, B, ...
        runs: at least one, in the order in which they were named.
        differing: names of the settings, beside head and seed, that differ among all runs compared.
    """

    label: str
    runs: tuple[RunFigures, ...]
    differing: tuple[str, ...]

    @property
    def head(self) -> str:
        """The head of all its runs."""
        return self.runs[0].head

    @property
    def description(self) -> str:
        """Head and differing settings in a line."""
        return ", ".join([self.head, *setting_texts(self.runs[0], self.differing)])

    @property
    def finished(self) -> tuple[RunFigures, ...]:
        """The runs that have a test perplexity."""
        return tuple(run for run in self.runs if run.final is not None)

    @property
    def test_perplexities(self) -> list[float]:
        """One for each finished run."""
        return [run.final.test_perplexity for run in self.runs if run.final is not None]

    @property
    def valid_perplexities(self) -> list[float]:
        """One for each finished run."""
        return [run.final.valid_perplexity for run in self.runs if run.final is not None]

    @property
    def texts(self) -> set[tuple[int, int, str]]:
        """The corpora of its finished runs; see :class:`FinalFigures`."""
        return {run.final.text for run in self.runs if run.final is not None}


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` returns.

    Attributes:
        runs: in the order in which they were named.
        differing: names of settings whose values are not the same in all runs, beside head, seed
            and folder.
        groups: runs that differ in the seed alone, in order of their first run.
        notes: what a reader must know beside the figures, a sentence each.
    """

    runs: tuple[RunFigures, ...]
    differing: tuple[str, ...]
    groups: tuple[RunGroup, ...]
    notes: tuple[str, ...]

    def label(self, run: RunFigures) -> str:
        """Label of the run's group."""
        return next(group.label for group in self.groups if any(r is run for r in group.runs))

    @property
    def repeated(self) -> bool:
        """Whether any group has more than one run."""
        return len(self.groups) < len(self.runs)


def compare(
    paths: Iterable[str | os.PathLike[str]], defaults: Mapping[str, Any] | None = None
) -> Comparison:
    """Read runs and put them side by side.

    Args:
        paths: run folders, each once.
        defaults: values of settings that a config.json does not hold.

    Raises:
        RunError: a folder is not a run.
        ValueError: no folder, or the same one twice.
    """
    folders = [Path(path) for path in paths]
    if not folders:
        raise ValueError("paths: expected at least one run folder, got none")
    counts = Counter(folder.resolve() for folder in folders)
    for folder in folders:
        if counts[folder.resolve()] > 1:
            raise ValueError(f"{folder}: expected every run once, got this folder twice")
    runs = tuple(read_run(folder, defaults) for folder in folders)
    differing = differing_settings(runs)
    groups = group_runs(runs)
    return Comparison(runs, differing, groups, tuple(_notes(runs, groups)))


def differing_settings(runs: Sequence[RunFigures]) -> tuple[str, ...]:
    """Names of settings whose values are not the same in all runs, beside head, seed and folder, in
    the order of the settings."""
    settings = [run.compared_settings() for run in runs]
    names = dict.fromkeys(itertools.chain.from_iterable(settings))
    return tuple(
        name
        for name in names
        if name != "head" and len({json.dumps(values.get(name)) for values in settings}) > 1
    )


def group_runs(runs: Sequence[RunFigures]) -> tuple[RunGroup, ...]:
    """Groups of runs whose settings differ in the seed alone (the folder's name aside)."""
    members: dict[str, list[RunFigures]] = {}
    for run in runs:
        key = json.dumps(run.compared_settings(), sort_keys=True)
        members.setdefault(key, []).append(run)
    differing = differing_settings(runs)
    return tuple(
        RunGroup(_letters(number), tuple(group), differing)
        for number, group in enumerate(members.values())
    )


def _letters(number: int) -> str:
    """A to Z, then AA, AB, ..."""
    text = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        text = chr(ord("A") + letter) + text
    return text


def _notes(runs: Sequence[RunFigures], groups: Sequence[RunGroup]) -> Iterable[str]:
    for run in runs:
        if run.final is None:
            planned = run.settings.get("epochs", "?")
            yield f"{run.path} has not finished: {len(run.epochs)} of {planned} epochs ended"
    if len(set().union(*(group.texts for group in groups))) > 1:
        yield "the runs are on different texts or vocabularies: their perplexities do not compare"
    for group in groups:
        seeds = Counter(run.seed for run in group.runs)
        again = sorted(str(seed) for seed, count in seeds.items() if count > 1)
        if again:
            yield (
                f"group {group.label} has runs of the same seed ({', '.join(again)}): "
                f"they are not independent samples"
            )


# Tables


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """The runs; if any of them share a group, the groups too."""
    found = [_run_table(comparison)]
    if comparison.repeated:
        found.append(_group_table(comparison))
    return tuple(found)


def _run_table(comparison: Comparison) -> Table:
    columns: list[tuple[str, bool, list[str]]] = [
        ("run", False, [str(run.path) for run in comparison.runs]),
        ("head", False, [run.head for run in comparison.runs]),
        ("seed", True, [text(run.seed) for run in comparison.runs]),
    ]
    if comparison.repeated:
        columns.insert(0, ("group", False, [comparison.label(run) for run in comparison.runs]))
    if comparison.differing:
        cells = [", ".join(setting_texts(run, comparison.differing)) for run in comparison.runs]
        columns.append(("settings that differ", False, cells))
    figures = [_run_figures(run) for run in comparison.runs]
    columns += [(name, True, [row[name] for row in figures]) for name in figures[0]]
    return table("Runs", columns)


def _run_figures(run: RunFigures) -> dict[str, str]:
    planned = run.settings.get("epochs", "?")
    final = run.final
    return {
        "epochs": f"{len(run.epochs)} of {planned}" if final is None else str(len(run.epochs)),
        "best epoch": text(run.best_epoch),
        "valid perplexity": decimals(run.valid_perplexity, 2),
        "test perplexity": decimals(run.test_perplexity, 2),
        "backbone parameters": count(None if final is None else final.backbone_parameters),
        "head parameters": count(None if final is None else final.head_parameters),
        "s per epoch": decimals(run.seconds_per_epoch, 1),
        "tokens/s": decimals(run.tokens_per_second, 0),
    }


def _group_table(comparison: Comparison) -> Table:
    rows = []
    for group in comparison.groups:
        cells = {
            "group": group.label,
            "model": group.description,
            "finished": f"{len(group.finished)} of {len(group.runs)}",
        }
        for name, values in (
            ("valid", group.valid_perplexities),
            ("test", group.test_perplexities),
        ):
            summary = mean_and_deviation(values)
            cells[f"{name}, mean"] = decimals(summary.mean if summary else None, 2)
            cells[f"{name}, SD"] = decimals(summary.deviation if summary else None, 2)
        rows.append(cells)
    left = ("group", "model")
    columns = [(name, name not in left, [row[name] for row in rows]) for name in rows[0]]
    return table("Perplexity of finished runs, mean and standard deviation over seeds", columns)


def setting_texts(run: RunFigures, names: Sequence[str]) -> list[str]:
    """``name=value`` of settings, the values as short text."""
    return [f"{name}={text(run.settings.get(name))}" for name in names]


def to_markdown(comparison: Comparison) -> str:
    """The tables and notes in Markdown."""
    return markdown(tables(comparison), comparison.notes)


def to_csv(comparison: Comparison) -> str:
    """The runs as CSV, one line each after a header, with unrounded numbers and a column for each
    setting that differs; empty cells where a run has nothing."""
    return csv_text([_csv_row(comparison, run) for run in comparison.runs])


def _csv_row(comparison: Comparison, run: RunFigures) -> dict[str, Any]:
    settings = {name: run.settings.get(name) for name in ("seed", *comparison.differing)}
    final = run.final
    return {
        "group": comparison.label(run),
        "run": str(run.path),
        "head": run.head,
        **{
            name: json.dumps(value) if isinstance(value, (bool, list)) else value
            for name, value in settings.items()
        },
        "finished": json.dumps(final is not None),
        "epochs_ended": len(run.epochs),
        "best_epoch": run.best_epoch,
        "valid_perplexity": run.valid_perplexity,
        "test_perplexity": run.test_perplexity,
        "backbone_parameters": None if final is None else final.backbone_parameters,
        "head_parameters": None if final is None else final.head_parameters,
        "seconds_per_epoch": run.seconds_per_epoch,
        "tokens_per_second": run.tokens_per_second,
    }
