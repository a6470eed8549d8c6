"""Plot of the time of a row against the number of classes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.paths import CLASSES
from hstree.lm.report import new_figure, picture

TREES = {1: "one tree over all features", 8: "eight trees over half of them"}


def plot_growth(contests: dict[str, Any], file: Path) -> None:
    """Plot time and nodes of a row against V, as multiples of those at the smallest V. Raises
    ValueError if the run has no such contests (by name, as in benchmarks.table)."""
    names = {t: f"growth, T = {t}" for t in TREES}
    if not any(name in contests for name in names.values()):
        raise ValueError(f"--plot: expected a run with {' or '.join(names.values())}")
    figure = new_figure(7, 3.5)
    axes = figure.subplots()
    visits: list[float] = []
    for t, title in TREES.items():
        if names[t] not in contests:
            continue
        contestants = contests[names[t]]["contestants"]
        steps = [contestants[f"V = {classes}"] for classes in CLASSES]
        axes.plot(CLASSES, _relative([median(s["seconds"]) for s in steps]), "o-", label=title)
        visits = [s["visits"] for s in steps]
    depth = _relative(visits)
    axes.plot(CLASSES, depth, "k--", label="nodes on the path to a class, Huffman trees")
    axes.set(xscale="log", ylim=(0, None), xlabel="classes V")
    axes.set_ylabel(f"time of a row, V = {CLASSES[0]:,} is 1")
    axes.legend()
    file.write_bytes(picture(figure))


def _relative(values: list[float]) -> list[float]:
    return [value / values[0] for value in values]
