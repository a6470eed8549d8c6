"""Correlation of two quantities of models, such as the rank of log P and the perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FENCE = 1.5
"""Distance of outliers from the quartiles, in interquartile ranges (Tukey 1977)."""


@dataclass(frozen=True)
class Fit:
    """Correlation of x and y over n points. ``low`` and ``high`` are the 95% confidence interval of
    ``pearson``, by Fisher's transformation. A p-value is the probability of a correlation at least
    as far from 0 if x and y are independent; for ``spearman``, by Student's distribution, it is
    approximate. ``slope`` and ``intercept`` are those of the least-squares line."""

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
    """What :func:`correlate` returns.

    Attributes:
        x, y: the points.
        outlier: for each point, whether it is an outlier of :func:`outliers` in x or in y.
        overall: correlation of all points.
        inner: correlation without the outliers; None if fewer than three points are left, or x or y
            is constant among them.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    outlier: tuple[bool, ...]
    overall: Fit
    inner: Fit | None

    @property
    def outliers(self) -> int:
        """The number of outliers."""
        return sum(self.outlier)

    @property
    def counted(self) -> str:
        """``1 outlier``, ``2 outliers``, ..."""
        return f"{self.outliers} {'outlier' if self.outliers == 1 else 'outliers'}"


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


def outliers(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """For each value, whether it is more than 1.5 interquartile ranges below the first or above the
    third quartile (Tukey, Exploratory Data Analysis, 1977). Quartiles are interpolated linearly."""
    array = np.asarray(values, dtype=np.float64)
    first, third = np.quantile(array, (0.25, 0.75))
    reach = FENCE * (third - first)
    outside: npt.NDArray[np.bool_] = (array < first - reach) | (array > third + reach)
    return outside


def _varies(values: npt.NDArray[np.float64]) -> bool:
    """Whether the values differ by more than the rounding of their mean."""
    return bool(np.ptp(values) > 1e-12 * np.abs(values).max())


def _fit(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], groups: int) -> Fit:
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
