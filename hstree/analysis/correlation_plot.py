"""The points of a correlation with their lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hstree._figures import COLOURS, new_figure, picture, plain

from .correlation import Correlation, Fit, counted

_ALL_LABELS = 12  # up to so many points, each has its label beside it; among more, only outliers
_MARKERS = "osD^vP*"


def correlation_plot(
    result: Correlation,
    x: str,
    y: str,
    labels: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    group: str = "",
) -> bytes:
    """A PNG picture: the points, outliers open, with the least-squares lines of all points and of
    those that are not outliers.

    Args:
        result: of :func:`correlation`.
        x, y: what the axes show.
        labels: text for each point, drawn beside outliers, and beside all of few points.
        groups: for each point what its colour tells: numbers become a scale of colours, other text
            a legend.
        group: what the groups are.

    Raises:
        ValueError: not as many labels or groups as points.
    """
    for name, texts in (("labels", labels), ("groups", groups)):
        if texts is not None and len(texts) != len(result.x):
            raise ValueError(f"{name}: expected {len(result.x)}, one a point, got {len(texts)}")
    figure = new_figure(7.2, 4.8)
    axes = figure.add_subplot()
    _lines(axes, result)
    numbers = _numbers(groups)
    if groups is None:
        _points(axes, result, range(len(result.x)), COLOURS[0], "o")
    elif numbers is not None:
        _scale(figure, axes, result, numbers, group)
    else:
        for number, name in enumerate(dict.fromkeys(groups)):
            members = [i for i, other in enumerate(groups) if other == name]
            style = COLOURS[number % len(COLOURS)], _MARKERS[number % len(_MARKERS)]
            _points(axes, result, members, *style, label=plain(name))
    middle = (min(result.x) + max(result.x)) / 2
    for i, text in enumerate(labels or ()):
        if result.outlier[i] or len(result.x) <= _ALL_LABELS:
            left = result.x[i] > middle  # of the point, so that the text stays in the picture
            axes.annotate(
                plain(text),
                (result.x[i], result.y[i]),
                xytext=(-5 if left else 5, 4),
                textcoords="offset points",
                ha="right" if left else "left",
                fontsize=7,
            )
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))
    axes.grid(alpha=0.3)
    entries = len(axes.get_legend_handles_labels()[0])
    figure.legend(
        loc="outside lower left", frameon=False, fontsize=8, ncols=2 if entries > 4 else 1
    )
    return picture(figure)


def _lines(axes: Any, result: Correlation) -> None:
    """The regression lines, behind the points."""
    label = f"all {result.overall.n} points: Pearson {result.overall.pearson:+.2f}"
    _line(axes, result.overall, result.x, "-", label)
    if result.inner is not None and result.outliers:
        inside = [v for v, out in zip(result.x, result.outlier, strict=True) if not out]
        label = f"without {counted(result)} (open): Pearson {result.inner.pearson:+.2f}"
        _line(axes, result.inner, inside, "--", label)


def _line(axes: Any, fit: Fit, x: Sequence[float], dashes: str, label: str) -> None:
    ends = [min(x), max(x)]
    heights = [fit.intercept + fit.slope * end for end in ends]
    axes.plot(ends, heights, dashes, color="#666666", lw=1.4, label=label, zorder=1)


def _points(
    axes: Any,
    result: Correlation,
    members: Sequence[int],
    colour: Any,
    marker: str,
    label: str | None = None,
) -> None:
    axes.scatter(
        [result.x[i] for i in members],
        [result.y[i] for i in members],
        s=30,
        c=["none" if result.outlier[i] else colour for i in members],
        edgecolors=colour,
        marker=marker,
        label=label,
        zorder=2,
    )


def _scale(
    figure: Any, axes: Any, result: Correlation, numbers: Sequence[float], group: str
) -> None:
    """Points coloured by a number, with the scale beside them."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale: Any = ScalarMappable(Normalize(min(numbers), max(numbers)), "cividis")
    for i, number in enumerate(numbers):
        _points(axes, result, [i], scale.to_rgba(number), "o")
    figure.colorbar(scale, ax=axes, label=plain(group))


def _numbers(groups: Sequence[str] | None) -> list[float] | None:
    """The groups as finite numbers, None if one is not."""
    try:
        numbers = [float(text) for text in groups or ()]
    except ValueError:
        return None
    return numbers if numbers and all(map(math.isfinite, numbers)) else None
