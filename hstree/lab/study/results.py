"""The finished runs of the contenders of a planned study, for its page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hstree.lm.table import Table

from ..comparison import spread
from ..report import row_table
from .plan import Contender, state
from .records import Records


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
