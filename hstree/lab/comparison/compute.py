"""Groups of runs that differ only in the seed.

The mean of a group includes only finished runs, since unfinished ones have no test perplexity.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hstree.lm.runs import RunResults, read_run
from hstree.lm.table import decimals, text


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation of n values. The deviation has n - 1 in the denominator
    and is nan if n is 1 or a value is not finite."""

    n: int
    mean: float
    deviation: float


def mean_and_deviation(values: Sequence[float]) -> Statistic | None:
    """Mean and sample standard deviation; None if there are no values."""
    n = len(values)
    if n == 0:
        return None
    if not all(map(math.isfinite, values)):
        return Statistic(n, sum(values) / n, math.nan)
    deviation = statistics.stdev(values) if n > 1 else math.nan
    return Statistic(n, statistics.fmean(values), deviation)


def spread(values: Iterable[float | None], digits: int = 2) -> str:
    """``mean ± standard deviation`` of the values that are known: the mean alone of one, ``-`` of
    none. The deviation has at least one decimal."""
    found = mean_and_deviation([value for value in values if value is not None])
    if found is None:
        return "-"
    text = decimals(digits)(found.mean)
    if not math.isnan(found.deviation):
        text += f" ± {decimals(max(digits, 1))(found.deviation)}"
    return text


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in the seed, at least one, in the order given; ``label``: A, B, ...;
    ``differing`` as in :class:`Comparison`."""

    label: str
    runs: tuple[RunResults, ...]
    differing: tuple[str, ...]

    @property
    def head(self) -> str:
        """The head of all its runs."""
        return self.runs[0].head

    @property
    def description(self) -> str:
        """Head and differing settings in one line."""
        return ", ".join([self.head, *setting_texts(self.runs[0], self.differing)])

    @property
    def finished(self) -> tuple[RunResults, ...]:
        """The runs that have a test perplexity."""
        return tuple(run for run in self.runs if run.final is not None)

    @property
    def test_perplexities(self) -> list[float]:
        """One value for each finished run."""
        return [run.final.test_perplexity for run in self.runs if run.final is not None]

    @property
    def valid_perplexities(self) -> list[float]:
        """One value for each finished run."""
        return [run.final.valid_perplexity for run in self.runs if run.final is not None]

    @property
    def texts(self) -> set[tuple[int, int, str]]:
        """The corpora of its finished runs. Perplexities on different corpora are not
        comparable."""
        return {run.final.text for run in self.runs if run.final is not None}


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` returns.

    Attributes:
        runs: all runs, in the order given.
        differing: names of the settings, other than head, seed and folder, that differ between
            runs whose heads read them.
        groups: groups of runs that differ only in the seed, in order of their first run.
        notes: what a reader must know in addition to the numbers, one sentence each.
    """

    runs: tuple[RunResults, ...]
    differing: tuple[str, ...]
    groups: tuple[RunGroup, ...]
    notes: tuple[str, ...]

    def label(self, run: RunResults) -> str:
        """Label of the run's group."""
        return next(group.label for group in self.groups if any(r is run for r in group.runs))

    @property
    def repeated(self) -> bool:
        """Whether any group has more than one run."""
        return len(self.groups) < len(self.runs)


def compare(paths: Iterable[str | os.PathLike[str]]) -> Comparison:
    """Read run folders and compare them. Raises ValueError if there is none, a folder is repeated,
    or one is not a run."""
    folders = [Path(path) for path in paths]
    if not folders:
        raise ValueError("paths: expected at least one run folder, got none")
    resolved = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, resolved, strict=True):
        if resolved.count(place) > 1:
            raise ValueError(f"{folder}: expected every run once, got this folder twice")
    runs = tuple(map(read_run, folders))
    settings = [run.compared_settings() for run in runs]
    names = dict.fromkeys(name for values in settings for name in values if name != "head")
    differing = tuple(
        name
        for name in names
        if len({json.dumps(values[name]) for values in settings if name in values}) > 1
    )
    members: dict[str, list[RunResults]] = {}
    for run, values in zip(runs, settings, strict=True):
        members.setdefault(json.dumps(values, sort_keys=True), []).append(run)
    groups = tuple(
        RunGroup(_letters(number), tuple(group), differing)
        for number, group in enumerate(members.values())
    )
    return Comparison(runs, differing, groups, tuple(_notes(runs, groups)))


def _letters(number: int) -> str:
    above, letter = divmod(number, 26)
    return (_letters(above - 1) if above else "") + chr(ord("A") + letter)


def _notes(runs: Sequence[RunResults], groups: Sequence[RunGroup]) -> Iterator[str]:
    for run in runs:
        if run.final is None:
            ended = f"{len(run.epochs)} of {run.config.epochs}"
            yield f"{run.path} has not finished: {ended} epochs completed"
    if len(set().union(*(group.texts for group in groups))) > 1:
        yield "the runs differ in text or vocabulary: their perplexities are not comparable"
    for group in groups:
        seeds = Counter(run.seed for run in group.runs)
        again = sorted(str(seed) for seed, count in seeds.items() if count > 1)
        if again:
            yield (
                f"group {group.label} has runs of the same seed ({', '.join(again)}): "
                f"they are not independent samples"
            )


def read_settings(run: RunResults, names: Sequence[str]) -> dict[str, Any]:
    """Those of the settings that the head of a run reads."""
    read = run.compared_settings()
    return {name: run.settings[name] for name in names if name in read}


def setting_texts(run: RunResults, names: Sequence[str]) -> list[str]:
    """``name=value`` of :func:`read_settings`, the values as short text."""
    return [f"{name}={text(value)}" for name, value in read_settings(run, names).items()]
