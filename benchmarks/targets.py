"""Targets of the benchmarks, and the table of targets and measurements, for CPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hstree.lm.table import Table, table


@dataclass(frozen=True)
class Target:
    """A measured number that should be at most or at least some value, or that is only shown."""

    title: str
    at_most: float | None = field(default=None, kw_only=True)
    at_least: float | None = field(default=None, kw_only=True)

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""


def target_table(title: str, rows: Sequence[tuple[Target, float | None]]) -> Table:
    """A table of targets and measurements; None: not measured."""
    return table(
        title,
        rows,
        [
            ("", lambda row: row[0].title),
            ("target", lambda row: row[0].limit),
            ("measured", lambda row: row[1], number),
        ],
    )


def number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
