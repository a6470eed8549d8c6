"""Correlation of two quantities of models, such as the rank of log P and the perplexity.

Pearson's and Spearman's correlation of two columns of a CSV file, such as the one of hstree study,
with and without outliers: points whose x or y is more than 1.5 interquartile ranges below the first
or above the third quartile (Tukey 1977). Pearson's 95% interval is by Fisher's transformation,
tanh(artanh(r) -+ 1.96 / sqrt(n - 3)), the p-values by Student's distribution (Parthiban et al.,
AAAI 2021, correlate rank and perplexity).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hstree.lm.cli import Argument
from hstree.lm.report import COLOURS, Table, legend, panels, plain, probability

from .report import MARKERS, Form, Measurement, Report, read_columns, record_table, skipped

Array = npt.NDArray[np.float64]
FENCE = 1.5  # interquartile ranges from the quartiles to the outliers


class Fit(NamedTuple):
    """Correlation of x and y over n points. ``low`` and ``high`` are the 95% confidence interval of
    ``pearson``. A p-value is the probability of a correlation at least as far from 0 if x and y are
    independent; for ``spearman`` it is approximate. ``slope`` and ``intercept`` are those of the
    least-squares line."""

    n: int
    pearson: float
    low: float
    high: float
    pearson_p: float
    spearman: float
    spearman_p: float
    slope: float
    intercept: float


@dataclass(frozen=True)
class Correlation:
    """Points x, y; for each whether it is an outlier in x or in y; the
    correlation of all points; and of those inside, None if too few are left or x or y is constant
    among them."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    outlier: tuple[bool, ...]
    overall: Fit
    inner: Fit | None


def correlate(x: Sequence[float], y: Sequence[float], *, groups: int = 1) -> Correlation:
    """Pearson's and Spearman's correlation of x and y, with and without outliers.

    Args:
        x, y: finite numbers, one pair for each point; at least two points more than groups.
        groups: number of groups whose means were removed from x and y before, G. They take
            G - 1 degrees of freedom from the interval and the p-values. 1: none were removed.

    Raises:
        ValueError: different lengths, fewer than G + 2 points, a number that is not finite, or a
            constant x or y.

    Example:
        >>> from hstree.lab import correlate
        >>> round(correlate([1, 2, 3, 4], [2, 1, 4, 3]).overall.pearson, 6)
        0.6
    """
    if len(x) != len(y):
        raise ValueError(f"y: expected {len(x)} values, one for each of x, got {len(y)}")
    if len(x) < groups + 2:
        least = "three points" if groups == 1 else f"{groups + 2} points for {groups} groups"
        raise ValueError(f"x: expected at least {least}, got {len(x)}")
    points = np.asarray([x, y], dtype=np.float64)
    for name, values in zip("xy", points, strict=True):
        if not np.isfinite(values).all():
            raise ValueError(f"{name}: expected finite numbers, got {values}")
        if not _varies(values):
            raise ValueError(f"{name}: expected values that vary, got {len(x)} times {values[0]:g}")
    outlier = outliers(points[0]) | outliers(points[1])
    inside = points[:, ~outlier]
    inner = None
    if inside.shape[1] >= groups + 2 and _varies(inside[0]) and _varies(inside[1]):
        inner = _fit(inside[0], inside[1], groups)
    overall = _fit(points[0], points[1], groups)
    return Correlation(tuple(x), tuple(y), tuple(outlier.tolist()), overall, inner)


def within(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """The values less the mean of their group, plus the mean of all: what is left of a quantity
    without the effect of the group, such as the seed of a run."""
    array, names = np.asarray(values, dtype=np.float64), np.asarray(groups)
    result = array + array.mean()
    for name in np.unique(names):
        result[names == name] -= array[names == name].mean()
    return [float(value) for value in result]


def outliers(values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """For each value, whether it is more than 1.5 interquartile ranges below the first or above the
    third quartile. Quartiles are interpolated linearly."""
    array = np.asarray(values, dtype=np.float64)
    first, third = np.quantile(array, (0.25, 0.75))
    reach = FENCE * (third - first)
    outside: npt.NDArray[np.bool_] = (array < first - reach) | (array > third + reach)
    return outside


def _varies(values: Array) -> bool:
    """Whether the values differ by more than the rounding of their mean."""
    return bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _fit(x: Array, y: Array, groups: int) -> Fit:
    from scipy.stats import linregress, norm, pearsonr, spearmanr, t

    freedom = len(x) - 1 - groups

    def p_value(r: float) -> float:
        """Two-sided, by Student's distribution."""
        if abs(r) >= 1:
            return 0.0
        return float(2 * t.sf(abs(r) * math.sqrt(freedom / ((1 - r) * (1 + r))), freedom))

    r, rho = float(pearsonr(x, y).statistic), float(spearmanr(x, y).statistic)
    if abs(r) >= 1:
        low = high = r
    elif freedom <= 1:
        low, high = -1.0, 1.0
    else:  # by Fisher's transformation
        reach = float(norm.ppf(0.975)) / math.sqrt(freedom - 1)
        low, high = math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)
    line = linregress(x, y)
    slopes = float(line.slope), float(line.intercept)
    return Fit(len(x), r, low, high, p_value(r), rho, p_value(rho), *slopes)


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
    labels = []
    for line in kept:
        cells = {name: line[f"--label {name}"] for name in arguments.label}
        pairs = cells.values() if len(cells) == 1 else map("=".join, cells.items())
        labels.append(", ".join(pairs))
    groups = None if arguments.group is None else [line["--group"] for line in kept]
    x, y = _words(arguments.x), _words(arguments.y)
    notes = [
        f"outliers: points whose x or y lies more than {FENCE} interquartile ranges below the "
        f"first or above the third quartile (Tukey); here {sum(result.outlier)} of {len(result.x)}"
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
    if result.inner is not None and any(result.outlier):
        rows.append((_without(result), result.inner))
    records = [
        {"points": points, "n": fit.n, "Pearson": fit.pearson}
        | {"95% interval": f"{fit.low:+.3f} to {fit.high:+.3f}", "Pearson p": fit.pearson_p}
        | {"Spearman": fit.spearman, "Spearman p": fit.spearman_p, "slope": fit.slope}
        for points, fit in rows
    ]
    forms: dict[str, Form] = {
        "Pearson": "+.3f",
        "Spearman": "+.3f",
        "95% interval": str,
        "slope": "+.3g",
    }
    forms |= dict.fromkeys(("Pearson p", "Spearman p"), probability)
    return record_table(f"Correlation of {y} with {x}", records, forms)


def _without(result: Correlation) -> str:
    n = sum(result.outlier)
    return f"without {n} outlier{'s' * (n != 1)}"


def _words(column: str) -> str:
    """The name of a column as words, with Press, a person's name, capitalized."""
    return column.replace("_", " ").replace("press rank", "Press rank")


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
    otherwise by a legend."""
    figure, axes = panels(7.2, 4.8)
    points = np.array([result.x, result.y])
    inside = points[0, ~np.array(result.outlier)]
    lines = [(result.overall, points[0], "-", f"all {result.overall.n} points")]
    if result.inner is not None and any(result.outlier):
        lines.append((result.inner, inside, "--", f"{_without(result)} (open)"))
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
        if result.outlier[i] or len(result.x) <= 12:
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
