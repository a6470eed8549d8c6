"""What benchmarks should reach, and the table of what they have reached, on a CPU and on a GPU.

No torch here: benchmarks.gpu_proof reports before anything is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Target:
    """A figure that should be at most or at least some number, or that is only shown."""

    title: str
    at_most: float | None = field(default=None, kw_only=True)
    at_least: float | None = field(default=None, kw_only=True)

    @property
    def wanted(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""


def target_table(title: str, rows: Sequence[tuple[Target, float | None]]) -> list[str]:
    """Lines of Markdown: targets and what was reached, None where that was not measured."""
    if not rows:
        return []
    return [
        f"| {title} | wanted | reached |",
        "| --- | --- | ---: |",
        *(f"| {target.title} | {target.wanted} | {number(reached)} |" for target, reached in rows),
    ]


def number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
