"""``hstree analyze correlation``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hstree.lm._arguments import Argument
from hstree.lm._pictures import COLOURS, legend, panels, plain
from hstree.lm.table import Table, count, number, probability, table

from ..columns import read_columns, skipped
from ..drawing import MARKERS
from ..report import Report
from ..runner import Measurement
from .compute import FENCE, Correlation, correlate, within


def measure(arguments: argparse.Namespace) -> Report:
    texts = {f"--label {name}": name for name in arguments.label}
    named = {"--group": arguments.group, "--within": arguments.within}
    texts |= {flag: name for flag, name in named.items() if name is not None}
    lines, empty = read_columns(arguments.table, texts, {"--x": arguments.x, "--y": arguments.y})
    kept = [line for line in lines if math.isfinite(line["--x"]) and math.isfinite(line["--y"])]
    points = [[line[axis] for line in kept] for axis in ("--x", "--y")]
    removed = 1
    if arguments.within is not None and kept:
        means_of = [line["--within"] for line in kept]
        points = [within(values, means_of) for values in points]
        removed = len(set(means_of))
    try:
        result = correlate(*points, groups=removed)
    except ValueError as error:
        raise ValueError(
            f"{arguments.table}, x = {arguments.x}, y = {arguments.y}: {error}"
        ) from None
    labels = [_label(line, arguments.label) for line in kept]
    groups = None if arguments.group is None else [line["--group"] for line in kept]
    x, y = _words(arguments.x), _words(arguments.y)
    notes = [
        f"outliers: points whose x or y lies more than {FENCE} interquartile ranges below the "
        f"first or above the third quartile (Tukey); here {result.outliers} of {len(result.x)}"
    ]
    if arguments.within is not None:
        notes.append(
            f"x and y less their means over the runs of equal {arguments.within}, in {removed} "
            f"groups: {removed - 1} degrees of freedom less in the interval and the p-values"
        )
    if result.inner is None:
        notes.append("without the outliers, too few points are left, or x or y is constant")
    infinite = len(lines) - len(kept)
    notes += skipped(empty, arguments.table, "an empty cell")
    notes += skipped(infinite, arguments.table, "nan or infinity")
    data = {name: getattr(arguments, name) for name in ("x", "y", "within")}
    data |= {"groups": removed, "left_out": empty + infinite}
    data |= {"all": result.overall, "without_outliers": result.inner}
    rows = [
        {"label": label, arguments.x: a, arguments.y: b, "outlier": str(outlier).lower()}
        for label, a, b, outlier in zip(labels, result.x, result.y, result.outlier, strict=True)
    ]
    shown = labels if arguments.label else None
    picture = correlation_picture(result, x, y, shown, groups, arguments.group or "")
    title = f"{x[:1].upper()}{x[1:]} against {y}"
    return Report(title, [correlation_table(result, x, y)], notes, data, rows, {"": picture})


def correlation_table(result: Correlation, x: str, y: str) -> Table:
    """The coefficients of all points and, if there are outliers, without them. ``x``, ``y``:
    names."""
    rows = [("all points", result.overall)]
    if result.inner is not None and result.outliers:
        rows.append((f"without {result.counted}", result.inner))
    signed = number("+.3f")
    return table(
        f"Correlation of {y} with {x}",
        rows,
        [
            ("points", lambda row: row[0]),
            ("n", lambda row: row[1].n, count),
            ("Pearson", lambda row: row[1].pearson, signed),
            ("95% interval", lambda row: (row[1].low, row[1].high), _interval),
            ("Pearson p", lambda row: row[1].pearson_p, probability),
            ("Spearman", lambda row: row[1].spearman, signed),
            ("Spearman p", lambda row: row[1].spearman_p, probability),
            ("slope", lambda row: row[1].slope, number("+.3g")),
        ],
    )


def _interval(ends: tuple[float, float]) -> str:
    return "-" if math.isnan(ends[0]) else f"{ends[0]:+.3f} to {ends[1]:+.3f}"


def _words(column: str) -> str:
    """The name of a column as words, with Press, a person's name, capitalized."""
    return column.replace("_", " ").replace("press rank", "Press rank")


def _label(line: Mapping[str, Any], names: list[str]) -> str:
    cells = [line[f"--label {name}"] for name in names]
    return cells[0] if len(cells) == 1 else ", ".join(map("=".join, zip(names, cells, strict=True)))


_ALL_LABELS = 12  # up to this many points, every point has a label; with more, only outliers


def correlation_picture(
    result: Correlation,
    x: str,
    y: str,
    labels: Sequence[str] | None = None,
    groups: Sequence[str] | None = None,
    group: str = "",
) -> Any:
    """Plot the points, with open markers for outliers, and the least-squares lines with and without
    outliers. ``labels``: text for each point, drawn at outliers, and at all points if they are few.
    ``groups``: for each point, the value of ``group`` that its color shows, by a scale for numbers,
    otherwise by a legend. Raises ValueError unless there is one for each point."""
    for name, texts in (("labels", labels), ("groups", groups)):
        if texts is not None and len(texts) != len(result.x):
            raise ValueError(f"{name}: expected {len(result.x)}, one a point, got {len(texts)}")
    figure, axes = panels(7.2, 4.8)
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
            # side of the label, so that the text stays inside
            left = 2 * result.x[i] > points[0].min() + points[0].max()
            offset, side = (-5, "right") if left else (5, "left")
            place = {"xytext": (offset, 4), "textcoords": "offset points", "ha": side}
            axes.annotate(plain(text), points[:, i], **place, fontsize=7)
    axes.set(xlabel=plain(x), ylabel=plain(y))
    legend(figure, ncols=2 if len(axes.get_legend_handles_labels()[0]) > 4 else 1)
    return figure


def _kinds(
    figure: Any, axes: Any, n: int, groups: Sequence[str] | None, group: str
) -> list[tuple[str | None, list[int], Any, str]]:
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
            MARKERS[number % len(MARKERS)],
        )
        for number, name in enumerate(dict.fromkeys(groups))
    ]


COMMAND = Measurement(
    "correlation",
    "rank against perplexity, over many runs",
    """\
Pearson's and Spearman's correlation of two columns of a CSV file, such as the ranks and
perplexities of the runs of hstree study, with and without outliers, and a scatter plot. Outliers
are points whose x or y is more than 1.5 interquartile ranges below the first or above the third
quartile (Tukey).
""",
    measure,
    (
        Argument("table", "CSV file with a line for each run", metavar="FILE"),
        Argument("--x", "column of the horizontal axis", "press_rank", metavar="COLUMN"),
        Argument("--y", "column of the vertical axis", "test_perplexity", metavar="COLUMN"),
        Argument(
            "--label",
            "column of labels, shown at outliers, and at all points if they are few; may be "
            "repeated",
            [],
            metavar="COLUMN",
            action="append",
        ),
        Argument(
            "--group",
            "column shown as color: a scale if it has numbers, otherwise a legend",
            metavar="COLUMN",
        ),
        Argument(
            "--within",
            "column, such as seed, whose effect is removed: x and y less their means over "
            "the lines with the same value",
            metavar="COLUMN",
        ),
    ),
)
