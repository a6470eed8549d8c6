"""Runs side by side: what they differ in, means over seeds, t-tests between groups of seeds.

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
from .table import Table, count, csv_text, decimals, markdown, probability, table, text


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
class TResult:
    """A two-sided t-test: statistic, degrees of freedom, and the probability of a statistic at
    least as far from 0 if the means are equal. All nan if no value varies within its group."""

    statistic: float
    degrees_of_freedom: float
    p_value: float


def student_t_test(first: Sequence[float], second: Sequence[float]) -> TResult:
    """Unpaired t-test for groups of equal variance (Student 1908).

        t = (m1 - m2) / sqrt(s^2 (1/n1 + 1/n2)),  s^2 = (sum of squares 1 + sum of squares 2) / df,
        df = n1 + n2 - 2

    Raises:
        ValueError: a group of fewer than two values; scipy is missing.
    """
    a, b = _two_groups(first, second)
    freedom = a.n + b.n - 2
    variance = ((a.n - 1) * a.deviation**2 + (b.n - 1) * b.deviation**2) / freedom
    return _t_result(a.mean - b.mean, variance * (1 / a.n + 1 / b.n), freedom)


def welch_t_test(first: Sequence[float], second: Sequence[float]) -> TResult:
    """Unpaired t-test for groups whose variances may differ (Welch 1947).

        t = (m1 - m2) / sqrt(e1 + e2),  e = s^2 / n,
        df = (e1 + e2)^2 / (e1^2 / (n1 - 1) + e2^2 / (n2 - 1))

    Raises:
        ValueError: a group of fewer than two values; scipy is missing.
    """
    a, b = _two_groups(first, second)
    errors = (a.deviation**2 / a.n, b.deviation**2 / b.n)
    total = sum(errors)
    spread = errors[0] ** 2 / (a.n - 1) + errors[1] ** 2 / (b.n - 1)
    return _t_result(a.mean - b.mean, total, total**2 / spread if spread > 0 else math.nan)


def _two_groups(first: Sequence[float], second: Sequence[float]) -> tuple[Statistic, Statistic]:
    for name, values in (("first", first), ("second", second)):
        if len(values) < 2:
            raise ValueError(f"{name}: a t-test needs at least two values, got {len(values)}")
    a, b = mean_and_deviation(first), mean_and_deviation(second)
    assert a is not None
    assert b is not None
    return a, b


def _t_result(difference: float, squared_error: float, freedom: float) -> TResult:
    try:
        from scipy.special import stdtr  # Student's distribution function
    except ImportError:
        raise ValueError("t-tests need scipy: pip install scipy") from None
    if not squared_error > 0:
        return TResult(math.nan, math.nan, math.nan)
    statistic = difference / math.sqrt(squared_error)
    return TResult(statistic, freedom, 2 * float(stdtr(freedom, -abs(statistic))))


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
class GroupTest:
    """Difference of the mean test perplexities of two groups, first minus second, and the unpaired
    t-tests that ask whether it could be chance."""

    first: str
    second: str
    difference: float
    welch: TResult
    student: TResult


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` returns.

    Attributes:
        runs: in the order in which they were named.
        differing: names of settings whose values are not the same in all runs, beside head, seed
            and folder.
        groups: runs that differ in the seed alone, in order of their first run.
        tests: one for each pair of groups that have at least two finished runs each on the same
            text; p-values are not corrected for their number.
        notes: what a reader must know beside the figures, a sentence each.
    """

    runs: tuple[RunFigures, ...]
    differing: tuple[str, ...]
    groups: tuple[RunGroup, ...]
    tests: tuple[GroupTest, ...]
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
        ValueError: no folder, or the same one twice; scipy is missing where there are t-tests.
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
    return Comparison(runs, differing, groups, _tests(groups), tuple(_notes(runs, groups)))


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


def _tests(groups: Sequence[RunGroup]) -> tuple[GroupTest, ...]:
    tested = [group for group in groups if len(group.finished) > 1 and len(group.texts) == 1]
    tests = []
    for a, b in itertools.combinations(tested, 2):
        if a.texts != b.texts:
            continue
        first, second = a.test_perplexities, b.test_perplexities
        difference = sum(first) / len(first) - sum(second) / len(second)
        tests.append(
            GroupTest(
                a.label,
                b.label,
                difference,
                welch_t_test(first, second),
                student_t_test(first, second),
            )
        )
    return tuple(tests)


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
    """The runs; if any of them share a group, the groups; if there are t-tests, these."""
    found = [_run_table(comparison)]
    if comparison.repeated:
        found.append(_group_table(comparison))
    if comparison.tests:
        found.append(_test_table(comparison))
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


def _test_table(comparison: Comparison) -> Table:
    rows = []
    for test in comparison.tests:
        cells = {"groups": f"{test.first} - {test.second}", "difference": f"{test.difference:+.2f}"}
        for name, result in (("Welch", test.welch), ("Student", test.student)):
            cells[f"{name} t"] = decimals(result.statistic, 2)
            cells[f"{name} df"] = decimals(result.degrees_of_freedom, 1)
            cells[f"{name} p"] = probability(result.p_value)
        rows.append(cells)
    columns = [(name, name != "groups", [row[name] for row in rows]) for name in rows[0]]
    title = "Unpaired t-tests of test perplexities, two-sided, not corrected for their number"
    return table(title, columns)


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
