"""Which runs a study still needs: rates are swept first, then more seeds follow at the best one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Records

SMALLEST_SHARE, LARGEST_SHARE = 1 / 64, 64.0
"""A sweep goes on beyond its values, but not further than these multiples of them."""


@dataclass(frozen=True)
class Contender:
    """One configuration of a study.

    Attributes:
        name: short name, for the command line.
        title: what it is, for the page.
        settings: settings of its runs.
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
class Run:
    """A run of a contender."""

    contender: Contender
    settings: Mapping[str, Any]
    seed: int

    @property
    def name(self) -> str:
        """For a folder: the contender, the values of its sweeps, and the seed."""
        keys = [*self.contender.sweeps, *self.contender.final]
        parts = [f"{key}={_text(self.settings[key])}" for key in keys if key in self.settings]
        return "-".join([self.contender.name, *parts, f"seed={self.seed}"])


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ",".join(map(str, value))


@dataclass(frozen=True)
class State:
    """How far a contender is.

    Attributes:
        tried: for each sweep its values with their validation perplexities.
        missing: the next runs, empty if all are done; those of a sweep first.
        settings: of the final runs; None while a sweep goes on.
        so_far: while the last sweep goes on, the settings with its best value so far, if its runs
            are as long as the final ones.
    """

    tried: dict[str, dict[float, float]]
    missing: tuple[Run, ...]
    settings: Mapping[str, Any] | None
    so_far: Mapping[str, Any] | None = None


def state(contender: Contender, contenders: Sequence[Contender], records: Records) -> State:
    """The tried values of a contender, its next runs and its final settings."""
    settings = dict(contender.settings)
    tried: dict[str, dict[float, float]] = {}
    if contender.like is not None:
        model = named(contenders, contender.like)
        found = state(model, contenders, records)
        if found.settings is None:
            return State(tried, found.missing, None)
        settings |= {key: found.settings[key] for key in model.sweeps}
    for name, values in contender.sweeps.items():
        tried[name] = {}
        wanted = list(values)
        while wanted:
            for value in wanted:
                figures = records.figures(settings | {name: value}, 1)
                if figures is not None:
                    diverged = figures["valid"] is None
                    tried[name][value] = math.inf if diverged else figures["valid"]
            missing = [value for value in wanted if value not in tried[name]]
            if missing:
                runs = tuple(Run(contender, settings | {name: v}, 1) for v in missing)
                comparable = name == list(contender.sweeps)[-1] and not contender.final
                if not tried[name] or not comparable:
                    return State(tried, runs, None)
                return State(tried, runs, None, settings | {name: _best(tried[name])})
            wanted = _beyond(tried[name], values)
        settings[name] = _best(tried[name])
    settings |= contender.final
    runs = (Run(contender, settings, seed) for seed in range(1, contender.seeds + 1))
    left = tuple(run for run in runs if records.figures(run.settings, run.seed) is None)
    return State(tried, left, settings)


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


def next_run(
    contenders: Sequence[Contender], records: Records, only: Collection[str] = ()
) -> Run | None:
    """The next run of a study, or None if it is complete. Within a group all sweeps come first,
    then the first seed of every contender, then the second.

    Args:
        contenders: all contenders of the study.
        records: the finished runs.
        only: names of the contenders that count; empty: all.
    """
    counted = [named(contenders, name) for name in only] or list(contenders)
    for group in sorted({contender.group for contender in counted}):
        states = [state(c, contenders, records) for c in counted if c.group == group]
        runs = [found.missing[0] for found in states if found.missing and found.settings is None]
        later = [run for found in states if found.settings is not None for run in found.missing]
        if runs:
            return runs[0]
        if later:
            return min(later, key=lambda run: run.seed)
    return None


def named(contenders: Iterable[Contender], name: str) -> Contender:
    """The contender of this name. Raises ValueError if there is none."""
    contenders = list(contenders)
    for contender in contenders:
        if contender.name == name:
            return contender
    names = ", ".join(contender.name for contender in contenders)
    raise ValueError(f"expected one of {names}, got {name!r}")
