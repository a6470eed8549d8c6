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

from .report import Form, Measurement, Report, read_columns, record_table, skipped

Array = npt.NDArray[np.float64]
FENCE = 1.5  # interquartile ranges from the quartiles to the outliers


class Fit(NamedTuple):
    """Correlation of x and y over n points. A p-value is the probability of a correlation at least
    as far from 0 if x and y are independent; for ``spearman`` it is approximate."""

    n: int
    pearson: float
    low: float  # 95% confidence interval of pearson
    high: float
    pearson_p: float
    spearman: float
    spearman_p: float
    slope: float  # of the least-squares line
    intercept: float


@dataclass(frozen=True)
class Correlation:
    """Points x, y; for each whether it is an outlier in x or in y; the correlation of all points;
    and of those inside, None if too few are left or x or y is constant among them."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    outlier: tuple[bool, ...]
    overall: Fit
    inner: Fit | None


def correlate(x: Sequence[float], y: Sequence[float], *, groups: int = 1) -> Correlation:
    """Pearson's and Spearman's correlation of x and y, with and without outliers. ``groups``:
    number of groups whose means were removed from x and y before, G; they take G - 1 degrees of
    freedom from the interval and the p-values. Raises ValueError for different lengths, fewer than
    G + 2 points, a number that is not finite, or a constant x or y.

    Example:
        >>> from hstree.lab import correlate
        >>> round(correlate([1, 2, 3, 4], [2, 1, 4, 3]).overall.pearson, 6)
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
    by = {} if arguments.within is None else {"--within": arguments.within}
    lines, empty = read_columns(arguments.table, by, {"--x": arguments.x, "--y": arguments.y})
    kept = [line for line in lines if math.isfinite(line["--x"]) and math.isfinite(line["--y"])]
    points = [[line[axis] for line in kept] for axis in ("--x", "--y")]
    removed = 1
    if by and kept:
        means_of = [line["--within"] for line in kept]
        points = [within(values, means_of) for values in points]
        removed = len(set(means_of))
    try:
        result = correlate(*points, groups=removed)
    except ValueError as error:
        where = f"{arguments.table}, x = {arguments.x}, y = {arguments.y}"
        raise ValueError(f"{where}: {error}") from None
    x, y = _words(arguments.x), _words(arguments.y)
    notes = [
        f"outliers: points whose x or y lies more than {FENCE} interquartile ranges below the "
        f"first or above the third quartile (Tukey); here {sum(result.outlier)} of {len(result.x)}"
    ]
    if by:
        notes.append(
            f"x and y less their means over the runs of equal {arguments.within}, in {removed} "
            f"groups: {removed - 1} degrees of freedom less in the interval and the p-values"
        )
    if result.inner is None:
        notes.append("without the outliers, too few points are left, or x or y is constant")
    infinite = len(lines) - len(kept)
    for number, reason in ((empty, "an empty cell"), (infinite, "nan or infinity")):
        notes += skipped(number, arguments.table, reason)
    data = {name: getattr(arguments, name) for name in ("x", "y", "within")}
    data |= {"groups": removed, "left_out": empty + infinite}
    data |= {"all": result.overall, "without_outliers": result.inner}
    data |= {"points": [*zip(result.x, result.y, result.outlier, strict=True)]}
    pictures = {"": correlation_picture(result, x, y)}
    title, table = f"{x[:1].upper()}{x[1:]} against {y}", correlation_table(result, x, y)
    return Report(title, [table], notes, data, pictures=pictures)


def _fits(result: Correlation) -> dict[str, Fit]:
    """Of all points and, if there are outliers, without them."""
    n = sum(result.outlier)
    found = {"all points": result.overall}
    if result.inner is not None and n:
        found[f"without {n} outlier{'s' * (n != 1)}"] = result.inner
    return found


def correlation_table(result: Correlation, x: str, y: str) -> Table:
    records = [
        {"points": points, "n": fit.n, "Pearson": fit.pearson}
        | {"95% interval": f"{fit.low:+.3f} to {fit.high:+.3f}", "Pearson p": fit.pearson_p}
        | {"Spearman": fit.spearman, "Spearman p": fit.spearman_p, "slope": fit.slope}
        for points, fit in _fits(result).items()
    ]
    forms: dict[str, Form] = {"Pearson": "+.3f", "Spearman": "+.3f", "slope": "+.3g"}
    forms |= {"95% interval": str, "Pearson p": probability, "Spearman p": probability}
    return record_table(f"Correlation of {y} with {x}", records, forms)


def _words(column: str) -> str:
    """The name of a column as words, with Press, a person's name, capitalized."""
    return column.replace("_", " ").replace("press rank", "Press rank")


def correlation_picture(result: Correlation, x: str, y: str) -> Any:
    """Plot the points, with open markers for outliers, and the least-squares lines with and without
    outliers."""
    figure, axes = panels(7.2, 4.8)
    points, outlier = np.array([result.x, result.y]), np.array(result.outlier)
    for (which, fit), dashes in zip(_fits(result).items(), ("-", "--"), strict=False):
        of = points[0] if dashes == "-" else points[0, ~outlier]
        ends = np.array([of.min(), of.max()])
        label = f"{which}: Pearson {fit.pearson:+.2f}"
        axes.plot(ends, fit.intercept + fit.slope * ends, dashes, color="#666666", label=label)
    colours = np.where(outlier, "none", COLOURS[0])
    axes.scatter(*points, s=30, c=colours, edgecolors=COLOURS[0], zorder=2)
    axes.set(xlabel=plain(x), ylabel=plain(y))
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
