"""Scatter plot of a correlation with its regression lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hstree.lm._pictures import COLOURS, new_figure, plain

from .compute import Correlation

_ALL_LABELS = 12  # up to this many points, every point has a label; with more, only outliers
_MARKERS = "osD^vP*"


def correlation_picture(
    result: Correlation,
    x: str,
    y: str,
    labels: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    group: str = "",
) -> Any:
    """Plot the points, with open markers for outliers, and the least-squares lines with and without
    outliers.

    Args:
        result: result of :func:`correlate`.
        x, y: labels of the axes.
        labels: text for each point, drawn at outliers, and at all points if they are few.
        groups: for each point, the value that its color shows: a color scale for numbers, otherwise
            a legend.
        group: name of ``groups``.

    Raises:
        ValueError: the number of labels or groups differs from that of points.
    """
    for name, texts in (("labels", labels), ("groups", groups)):
        if texts is not None and len(texts) != len(result.x):
            raise ValueError(f"{name}: expected {len(result.x)}, one a point, got {len(texts)}")
    figure = new_figure(7.2, 4.8)
    axes = figure.add_subplot()
    points = np.array([result.x, result.y])
    inside = points[0, ~np.array(result.outlier)]
    lines = [(result.overall, points[0], "-", f"all {result.overall.n} points")]
    if result.inner is not None and result.outliers:
        lines.append((result.inner, inside, "--", f"without {result.counted} (open)"))
    for fit, of, dashes, which in lines:
        ends = np.array([of.min(), of.max()])
        heights = fit.intercept + fit.slope * ends
        title = f"{which}: Pearson {fit.pearson:+.2f}"
        axes.plot(ends, heights, dashes, color="#666666", lw=1.4, label=title, zorder=1)
    for label, members, colour, marker in _kinds(figure, axes, len(points[0]), groups, group):
        axes.scatter(
            *points[:, members],
            s=30,
            c=["none" if result.outlier[i] else colour for i in members],
            edgecolors=colour,
            marker=marker,
            label=label,
            zorder=2,
        )
    for i, text in enumerate(labels or ()):
        if result.outlier[i] or len(result.x) <= _ALL_LABELS:
            left = (
                2 * result.x[i] > points[0].min() + points[0].max()
            )  # side of the label, so that the text stays inside
            axes.annotate(
                plain(text),
                points[:, i],
                xytext=(-5 if left else 5, 4),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=7,
            )
    axes.set(xlabel=plain(x), ylabel=plain(y))
    axes.grid(alpha=0.3)
    ncols = 2 if len(axes.get_legend_handles_labels()[0]) > 4 else 1
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=ncols)
    return figure


def _kinds(
    figure: Any, axes: Any, n: int, groups: Sequence[str] | None, group: str
) -> list[tuple[str | None, list[int], Any, str]]:
    """Label, points, color and marker of each kind of point."""
    if groups is None:
        return [(None, list(range(n)), COLOURS[0], "o")]
    try:
        numbers = [float(text) for text in groups]
    except ValueError:
        numbers = [math.nan]
    if all(map(math.isfinite, numbers)):
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale: Any = ScalarMappable(Normalize(min(numbers), max(numbers)), "cividis")
        figure.colorbar(scale, ax=axes, label=plain(group))
        return [(None, [i], scale.to_rgba(number), "o") for i, number in enumerate(numbers)]
    return [
        (
            plain(name),
            [i for i, other in enumerate(groups) if other == name],
            COLOURS[number % len(COLOURS)],
            _MARKERS[number % len(_MARKERS)],
        )
        for number, name in enumerate(dict.fromkeys(groups))
    ]
