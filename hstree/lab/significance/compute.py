"""Significance of differences between models: unpaired t-tests over the seeds of each model."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..comparison.compute import Comparison, mean_and_deviation

CONFIDENCE = 0.95
"""Confidence level of the intervals."""


@dataclass(frozen=True)
class TTest:
    """An unpaired two-sided t-test of equal means: the statistic t, its degrees of freedom, the
    probability of a t at least as far from 0 if the means are equal, their difference (first minus
    second) and its 95% confidence interval."""

    statistic: float
    degrees_of_freedom: float
    p_value: float
    difference: float
    low: float
    high: float


def t_test(
    first: Sequence[float], second: Sequence[float], *, equal_variances: bool = False
) -> TTest:
    """Welch's t-test (1947), or with equal variances Student's (1908).

        t = (m1 - m2) / sqrt(s1^2 / n1 + s2^2 / n2)
        t = (m1 - m2) / sqrt(s^2 (1 / n1 + 1 / n2)),  s^2 the pooled variance

    Equivalent to::

        scipy.stats.ttest_ind(first, second, equal_var=equal_variances)

    If no group varies, so that the denominator is 0, or if a value is not finite, all attributes
    except the difference are nan.

    Raises:
        ValueError: a group has fewer than two values.
    """
    from scipy.stats import ttest_ind

    for name, values in (("first", first), ("second", second)):
        if len(values) < 2:
            raise ValueError(
                f"{name}: expected at least two values for a t-test, got {len(values)}"
            )
    finite = all(map(math.isfinite, (*first, *second)))
    add = math.fsum if finite else sum
    difference = add(first) / len(first) - add(second) / len(second)
    if not finite or len(set(first)) == len(set(second)) == 1:
        return TTest(math.nan, math.nan, math.nan, difference, math.nan, math.nan)
    with warnings.catch_warnings():
        # scipy warns of lost precision if one group does not vary; the result then depends on the
        # other.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        result = ttest_ind(first, second, equal_var=equal_variances)
    low, high = map(float, result.confidence_interval(CONFIDENCE))
    t, df, p = map(float, (result.statistic, result.df, result.pvalue))
    return TTest(t, df, p, difference, low, high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct m p-values for their number (Holm 1979); returns them in the same order.

    The i-th smallest becomes max_{j <= i} min(1, (m - j + 1) p_j). If hypotheses with values below
    alpha are rejected, the probability of any false rejection among all m is at most alpha. nan
    stays nan and is not counted in m.

    Example:
        >>> from hstree.lab import holm
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(
        (i for i, p in enumerate(p_values) if not math.isnan(p)), key=p_values.__getitem__
    )
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(order):
        corrected[i] = largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
    return corrected


@dataclass(frozen=True)
class Sample:
    """The values of one model, one for each seed; their mean; their standard deviation, with n - 1
    in the denominator, nan for a single value or if one is not finite; and the 95% confidence
    interval of the mean, mean -+ t_{n-1} deviation / sqrt(n), nan if the deviation is nan or 0."""

    name: str
    values: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float


@dataclass(frozen=True)
class PairTest:
    """Welch's and Student's test of two models, and their p-values corrected by :func:`holm` over
    all pairs."""

    first: str
    second: str
    welch: TTest
    student: TTest
    welch_corrected: float
    student_corrected: float


@dataclass(frozen=True)
class Significance:
    """What :func:`significance_tests` returns: the models, a test for each pair that can be tested,
    and notes, one sentence each."""

    samples: tuple[Sample, ...]
    pairs: tuple[PairTest, ...]
    notes: tuple[str, ...]


def significance_tests(values: Mapping[str, Sequence[float]]) -> Significance:
    """Test every pair of models for a difference of the means of their values, one for each seed,
    such as test perplexities. A model with fewer than two values, or with one that is not finite,
    is listed but not tested. Raises ValueError if fewer than two models can be tested."""
    samples = tuple(_sample(name, numbers) for name, numbers in values.items())
    notes, tested = [], []
    for sample in samples:
        if len(sample.values) < 2:
            notes.append(f"{sample.name} is not tested: it has one value, a t-test needs two")
        elif not all(map(math.isfinite, sample.values)):
            notes.append(f"{sample.name} is not tested: not all its values are finite")
        else:
            tested.append(sample)
    if len(tested) < 2:
        raise ValueError(
            f"expected at least two models with two or more finite values each, got {len(tested)} "
            f"of {len(samples)}"
        )
    couples = list(itertools.combinations(tested, 2))
    welch = [t_test(a.values, b.values) for a, b in couples]
    student = [t_test(a.values, b.values, equal_variances=True) for a, b in couples]
    welch_p = holm([test.p_value for test in welch])
    student_p = holm([test.p_value for test in student])
    pairs = tuple(
        PairTest(a.name, b.name, welch[i], student[i], welch_p[i], student_p[i])
        for i, (a, b) in enumerate(couples)
    )
    for pair in pairs:
        if math.isnan(pair.welch.p_value):
            notes.append(
                f"{pair.first} and {pair.second} are not tested: neither varies from seed to seed"
            )
    return Significance(samples, pairs, tuple(notes))


def _sample(name: str, values: Sequence[float]) -> Sample:
    from scipy.stats import t

    summary = mean_and_deviation(values)
    if summary is None:
        raise ValueError(f"{name}: expected at least one value, got none")
    low = high = math.nan
    if summary.deviation > 0:
        error = summary.deviation / math.sqrt(summary.n)
        low, high = map(float, t.interval(CONFIDENCE, summary.n - 1, summary.mean, error))
    return Sample(name, tuple(values), summary.mean, summary.deviation, low, high)


def model_perplexities(comparison: Comparison) -> dict[str, list[float]]:
    """The test perplexities of the finished runs of each group, for :func:`significance_tests`. The
    name of a group is its head, with its label if another group has the same head. Raises
    ValueError if the finished runs are on different texts."""
    groups = [group for group in comparison.groups if group.finished]
    if len(set().union(*(group.texts for group in groups))) > 1:
        raise ValueError(
            "the runs differ in text or vocabulary: their perplexities are not comparable"
        )
    heads = [group.head for group in groups]
    return {
        head if heads.count(head) == 1 else f"{group.label}: {head}": group.test_perplexities
        for head, group in zip(heads, groups, strict=True)
    }
