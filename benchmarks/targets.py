"""Targets of the benchmarks, and the table of targets and measurements, for CPU and GPU.

Does not import torch: benchmarks.gpu_proof reports before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


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


def target_table(title: str, rows: Sequence[tuple[Target, float | None]]) -> list[str]:
    """A Markdown table of targets and measurements; None: not measured."""
    if not rows:
        return []
    return [
        f"| {title} | target | measured |",
        "| --- | --- | ---: |",
        *(f"| {target.title} | {target.limit} | {number(reached)} |" for target, reached in rows),
    ]


def number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
