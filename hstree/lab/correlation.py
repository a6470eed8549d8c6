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
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm.cli import Argument
from hstree.lm.report import COLOURS, legend, panels, plain, probability

from .report import Form, Measurement, Report, interval, read_columns, record_table, skipped

Array = npt.NDArray[np.float64]
FENCE = 1.5  # interquartile ranges from the quartiles to the outliers


def correlate(x: Sequence[float], y: Sequence[float], *, groups: int = 1) -> list[dict[str, Any]]:
    """Pearson's and Spearman's correlation of x and y over all points, and without the outliers in
    x or in y.

    Args:
        x, y: at least G + 2 points; finite numbers that vary.
        groups: number of groups whose means were removed from x and y before, G; they take G - 1
            degrees of freedom from the interval and the p-values.

    Returns:
        A record of all points and, if there are outliers, enough others, and these vary, one of the
        others: their number n, Pearson's correlation with its 95% interval, Spearman's, and the
        slope of the least-squares line. p is the probability of a correlation at least as far from
        0 if x and y are independent; for Spearman's it is approximate.

    Raises:
        ValueError: x or y is not as above.

    Example:
        >>> from hstree.lab import correlate
        >>> round(correlate([1, 2, 3, 4], [2, 1, 4, 3])[0]["Pearson"], 6)
        0.6
    """
    if len(x) != len(y) or len(x) < groups + 2:
        raise ValueError(f"x, y: expected at least {groups + 2} points, got {len(x)} and {len(y)}")
    points = np.asarray([x, y], dtype=np.float64)
    for name, values in zip("xy", points, strict=True):
        if not np.isfinite(values).all():
            raise ValueError(f"{name}: expected finite numbers, got {values}")
        if not _varies(values):
            raise ValueError(f"{name}: expected values that vary, got {len(x)} times {values[0]:g}")
    found = [{"points": "all points"} | _fit(points, groups)]
    outlier = outliers(x, y)
    n, inside = int(outlier.sum()), points[:, ~outlier]
    if n and inside.shape[1] >= groups + 2 and all(map(_varies, inside)):
        found.append({"points": f"without {n} outlier{'s' * (n != 1)}"} | _fit(inside, groups))
    return found


def within(values: Sequence[float], groups: Sequence[str]) -> list[float]:
    """The values less the mean of their group, plus the mean of all: what is left of a quantity
    without the effect of the group, such as the seed of a run."""
    array, names = np.asarray(values, dtype=np.float64), np.asarray(groups)
    result = array + array.mean()
    for name in np.unique(names):
        result[names == name] -= array[names == name].mean()
    return [float(value) for value in result]


def outliers(*values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """For each point, whether one of its coordinates is more than 1.5 interquartile ranges below
    the first or above the third quartile of this coordinate, interpolated linearly."""
    points = np.asarray(values, dtype=np.float64)
    first, third = np.quantile(points, (0.25, 0.75), axis=1, keepdims=True)
    reach = FENCE * (third - first)
    outside = (points < first - reach) | (points > third + reach)
    found: npt.NDArray[np.bool_] = outside.any(0)
    return found


def _varies(values: Array) -> bool:
    """Whether the values differ by more than the rounding of their mean."""
    return bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _fit(points: Array, groups: int) -> dict[str, Any]:
    from scipy.stats import linregress, norm, pearsonr, spearmanr, t

    x, y = points
    freedom = len(x) - 1 - groups

    def p_value(r: float) -> float:
        """Two-sided, by Student's distribution."""
        if abs(r) >= 1:
            return 0.0
        return float(2 * t.sf(abs(r) * math.sqrt(freedom / ((1 - r) * (1 + r))), freedom))

    r, rho = float(pearsonr(x, y).statistic), float(spearmanr(x, y).statistic)
    if abs(r) >= 1:
        ends = r, r
    elif freedom <= 1:
        ends = -1.0, 1.0
    else:  # by Fisher's transformation
        reach = float(norm.ppf(0.975)) / math.sqrt(freedom - 1)
        ends = math.tanh(math.atanh(r) - reach), math.tanh(math.atanh(r) + reach)
    fit = {"n": len(x), "Pearson": r, "95% interval": ends, "Pearson p": p_value(r)}
    fit |= {"Spearman": rho, "Spearman p": p_value(rho), "slope": float(linregress(x, y).slope)}
    return fit


def measure(arguments: argparse.Namespace) -> Report:
    by = {} if arguments.within is None else {"--within": arguments.within}
    lines, empty = read_columns(arguments.table, by, {"--x": arguments.x, "--y": arguments.y})
    kept = [line for line in lines if math.isfinite(line["--x"]) and math.isfinite(line["--y"])]
    x, y = ([line[axis] for line in kept] for axis in ("--x", "--y"))
    removed = 1
    if by and kept:
        means_of = [line["--within"] for line in kept]
        x, y, removed = within(x, means_of), within(y, means_of), len(set(means_of))
    try:
        found = correlate(x, y, groups=removed)
    except ValueError as error:
        where = f"{arguments.table}, x = {arguments.x}, y = {arguments.y}"
        raise ValueError(f"{where}: {error}") from None
    outlier = outliers(x, y)
    notes = [
        f"outliers: points whose x or y lies more than {FENCE} interquartile ranges below the "
        f"first or above the third quartile (Tukey); here {sum(outlier)} of {len(x)}"
    ]
    if by:
        notes.append(
            f"x and y less their means over the runs of equal {arguments.within}, in {removed} "
            f"groups: {removed - 1} degrees of freedom less in the interval and the p-values"
        )
    if outlier.any() and len(found) == 1:
        notes.append("without the outliers, too few points are left, or x or y is constant")
    notes += skipped(empty, arguments.table, "an empty cell")
    notes += skipped(len(lines) - len(kept), arguments.table, "nan or infinity")
    names = [n.replace("_", " ").replace("press", "Press") for n in (arguments.x, arguments.y)]
    forms: dict[str, Form] = {"Pearson": "+.3f", "Spearman": "+.3f", "slope": "+.3g"}
    forms |= {"95% interval": interval("+.3f"), "Pearson p": probability, "Spearman p": probability}
    table = record_table(f"Correlation of {names[1]} with {names[0]}", found, forms)
    title, data = f"{names[0][:1].upper()}{names[0][1:]} against {names[1]}", {"x": x, "y": y}
    picture = correlation_picture(np.array([x, y]), found)
    picture.axes[0].set(xlabel=plain(names[0]), ylabel=plain(names[1]))
    return Report(title, [table], notes, data | {"outlier": outlier}, {"": picture})


def correlation_picture(points: Array, found: Sequence[dict[str, Any]]) -> Any:
    """Plot the points [2, n], with open markers for outliers, and the least-squares lines with and
    without outliers, of :func:`correlate`."""
    figure, axes = panels(7.2, 4.8)
    outlier = outliers(*points)
    for fit, dashes, of in zip(found, ("-", "--"), (points, points[:, ~outlier]), strict=False):
        ends, (x, y) = np.array([of[0].min(), of[0].max()]), of.mean(1)
        label = f"{fit['points']}: Pearson {fit['Pearson']:+.2f}"
        axes.plot(ends, y + fit["slope"] * (ends - x), dashes, color="#666666", label=label)
    colours = np.where(outlier, "none", COLOURS[0])
    axes.scatter(*points, s=30, c=colours, edgecolors=COLOURS[0], zorder=2)
    legend(figure)
    return figure


_WITHIN = "column, such as seed, whose effect is removed: x and y less their means over the lines "
COMMAND = Measurement(
    "correlation",
    "rank against perplexity, over many runs",
    measure,
    (
        Argument("table", "CSV file with a line for each run", metavar="FILE"),
        Argument("--x", "column of the horizontal axis", "press_rank", metavar="COLUMN"),
        Argument("--y", "column of the vertical axis", "test_perplexity", metavar="COLUMN"),
        Argument("--within", f"{_WITHIN}with the same value", metavar="COLUMN"),
    ),
)
