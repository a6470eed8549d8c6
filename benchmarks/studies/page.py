"""Parts of the pages of studies: finished runs of a contender, tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .plan import Contender, state
from .records import Records


@dataclass(frozen=True)
class Result:
    """The finished runs of a contender with its chosen settings.

    Attributes:
        contender: the contender.
        settings: their settings.
        runs: figures of each finished seed, at least one.
        chosen: whether the sweeps are finished.
    """

    contender: Contender
    settings: Mapping[str, Any]
    runs: Sequence[Mapping[str, Any]]
    chosen: bool = True

    @property
    def title(self) -> str:
        """What it is; says so if the settings are only the best so far."""
        return self.contender.title + ("" if self.chosen else " (sweep not finished)")

    def mean(self, figure: str) -> float | None:
        """Mean of a figure over the seeds; None if a run has none."""
        values = [run.get(figure) for run in self.runs]
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if len(known) == len(values) else None

    def spread(self, figure: str, decimals: int = 1) -> str:
        """Mean ± standard deviation of a figure over the seeds, as text."""
        if self.mean(figure) is None:
            return "diverged"
        return mean_and_spread([run[figure] for run in self.runs], decimals)


def mean_and_spread(values: Sequence[float], decimals: int = 1) -> str:
    """Mean ± standard deviation, as text; the mean alone of one value."""
    text = f"{statistics.fmean(values):.{decimals}f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{max(decimals, 1)}f}"
    return text


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


def sweep_rows(contenders: Sequence[Contender], records: Records) -> list[str]:
    """Rows of a table: contender, setting, and each tried value with its perplexity."""
    rows = []
    for contender in contenders:
        for name, tried in state(contender, contenders, records).tried.items():
            values = ", ".join(f"{value:g}: {tried[value]:.1f}" for value in sorted(tried))
            if values:
                rows.append(f"| {contender.title} | {name.replace('_', ' ')} | {values} |")
    return rows


def table(columns: Sequence[str], rows: Iterable[str], left: int = 1) -> list[str]:
    """A Markdown table; the first ``left`` columns are aligned to the left."""
    dashes = ["---"] * left + ["---:"] * (len(columns) - left)
    return [f"| {' | '.join(columns)} |", f"| {' | '.join(dashes)} |", *rows, ""]


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
