"""The runs of a planned study: rates are swept first, then seeds follow at the best one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .records import Records, key

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
