"""Whether models differ by more than chance: unpaired two-sided t-tests over their seeds.

Welch's test (1947, for different variances) and Student's (1908, for equal ones) of equal means,

    t = (m1 - m2) / sqrt(s1^2 / n1 + s2^2 / n2),
    t = (m1 - m2) / sqrt(s^2 (1 / n1 + 1 / n2)),  s^2 the pooled variance,

for all pairs of models, with Holm's correction for the number of pairs (1979), and 95% confidence
intervals of means and differences, as in Parthiban et al., AAAI 2021. The values are a column of a
CSV file, such as the one that hstree study or hstree compare --format csv writes.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hstree.lm.cli import Argument
from hstree.lm.report import Table, line_style, panels, plain, probability

from .report import (
    Form,
    Measurement,
    Report,
    interval,
    read_columns,
    record_table,
    row_table,
    skipped,
)

CONFIDENCE = 0.95
Record = dict[str, Any]


class TTest(NamedTuple):
    """An unpaired two-sided t-test of equal means."""

    statistic: float
    degrees_of_freedom: float
    p_value: float  # probability of a t at least as far from 0 if the means are equal
    difference: float  # of the means, first minus second
    low: float  # 95% confidence interval of the difference
    high: float


def t_test(
    first: Sequence[float], second: Sequence[float], *, equal_variances: bool = False
) -> TTest:
    """Welch's t-test, or with equal variances Student's.

    Equivalent to::

        scipy.stats.ttest_ind(first, second, equal_var=equal_variances)

    of at least two values each. If no group varies, so that the denominator is 0, or if a value is
    not finite, all attributes except the difference are nan.
    """
    from scipy.stats import ttest_ind

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
    """Correct m p-values for their number; returns them in the same order.

    The i-th smallest becomes max_{j <= i} min(1, (m - j + 1) p_j). If hypotheses with values below
    alpha are rejected, the probability of any false rejection among all m is at most alpha. nan
    stays nan and is not counted in m.

    Example:
        >>> from hstree.lab import holm
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    known = [i for i, p in enumerate(p_values) if not math.isnan(p)]
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, i in enumerate(sorted(known, key=p_values.__getitem__)):
        corrected[i] = largest = max(largest, min(1.0, (len(known) - rank) * p_values[i]))
    return corrected


def sample(values: Sequence[float]) -> Record:
    """n, mean, standard deviation (SD) with n - 1 in the denominator, and least and greatest of the
    values of a model, one for each seed, and the 95% interval of the mean, mean -+ t_{n-1} SD /
    sqrt(n). SD and interval are nan for a single value or if one is not finite, the interval also
    if SD is 0."""
    from scipy.stats import t

    n, mean, ends = len(values), sum(values) / len(values), (math.nan, math.nan)
    deviation = statistics.stdev(values) if n > 1 and math.isfinite(mean) else math.nan
    if deviation > 0:
        low, high = t.interval(CONFIDENCE, n - 1, mean, deviation / math.sqrt(n))
        ends = float(low), float(high)
    record = {"n": n, "mean": mean, "SD": deviation, "95% interval": ends}
    return record | {"least": min(values), "greatest": max(values)}


def testable(samples: Sequence[Record]) -> list[str]:
    """The names of the models with two or more values, all of them finite."""
    return [of["model"] for of in samples if of["n"] > 1 and math.isfinite(of["mean"])]


def significance_tests(values: Mapping[str, Sequence[float]]) -> tuple[list[Record], list[Record]]:
    """Test every pair of models for a difference of the means of their values, one for each seed,
    such as test perplexities.

    Returns:
        A record for each model, see ``sample``; and for each pair of ``testable`` models:
        the difference of their means, and t, degrees of freedom, p and p after Holm's correction
        over all pairs of both tests, nan if neither model varies.

    Raises:
        ValueError: fewer than two models can be tested.
    """
    samples = [{"model": name} | sample(of) for name, of in values.items()]
    tested = testable(samples)
    if len(tested) < 2:
        expected = "expected at least two models with two or more finite values each"
        raise ValueError(f"{expected}, got {len(tested)} of {len(samples)}")
    couples = [*itertools.combinations(tested, 2)]
    pairs: list[Record] = [{"models": f"{first} - {second}"} for first, second in couples]
    for name in ("Welch", "Student"):
        tests = [
            t_test(values[first], values[second], equal_variances=name == "Student")
            for first, second in couples
        ]
        corrected = holm([test.p_value for test in tests])
        for pair, test, p in zip(pairs, tests, corrected, strict=True):
            if name == "Welch":
                pair |= {"difference of means": test.difference}
                pair |= {"95% interval": (test.low, test.high)}
            pair |= {f"{name} t": test.statistic, f"{name} df": test.degrees_of_freedom}
            pair |= {f"{name} p": test.p_value, f"{name} p, Holm": p}
    return samples, pairs


def measure(arguments: argparse.Namespace) -> Report:
    columns = {"--model": arguments.model}, {"--table": "test_perplexity"}
    lines, left_out = read_columns(arguments.table, *columns)
    values: dict[str, list[float]] = {}
    for line in lines:
        values.setdefault(line["--model"], []).append(line["--table"])
    samples, pairs = significance_tests(values)
    notes = skipped(left_out, arguments.table, "an empty cell")
    notes += [
        f"{of['model']} is not tested: "
        + ("not all its values are finite" if of["n"] > 1 else "it has one value")
        for of in samples
        if of["model"] not in testable(samples)
    ]
    notes += [
        f"{' and '.join(pair)} are not tested: neither varies from seed to seed"
        for pair, of in zip(itertools.combinations(testable(samples), 2), pairs, strict=True)
        if math.isnan(of["Welch p"])
    ]
    tables, pictures = significance_tables(samples, pairs), {}
    pictures[""] = significance_picture(samples, values)
    title = "Significance of differences in test perplexity"
    return Report(title, tables, notes, {"values": values}, pictures)


def significance_tables(samples: list[Record], pairs: list[Record]) -> list[Table]:
    forms: dict[str, Form] = {"difference of means": "+.3f", "95% interval": interval(",.3f")}
    forms |= dict.fromkeys(("mean", "SD", "least", "greatest"), ",.3f")
    for name in ("Welch", "Student"):
        forms |= {f"{name} t": ",.2f", f"{name} df": ",.1f"}
        forms |= {f"{name} p": probability, f"{name} p, Holm": probability}
    names, p = testable(samples), {}
    for (first, second), pair in zip(itertools.combinations(names, 2), pairs, strict=True):
        p[first, second], p[second, first] = pair["Welch p, Holm"], pair["Welch p"]
    matrix = [[row, *(p.get((row, name), math.nan) for name in names)] for row in names]
    tested = sum(not math.isnan(pair["Welch p"]) for pair in pairs)
    of_pairs = "Unpaired two-sided t-tests of equal mean test perplexity; Holm: corrected for "
    p_values = "p-values of Welch's test: above the diagonal after Holm's correction, below without"
    return [
        record_table("Test perplexity of each model over its seeds", samples, forms),
        record_table(f"{of_pairs}{tested} test{'s' * (tested != 1)}", pairs, forms),
        row_table(p_values, ("model", *names), matrix, None, probability),
    ]


def significance_picture(samples: list[Record], values: Mapping[str, Sequence[float]]) -> Any:
    """A row for each model: a dot for each seed, and above the dots the mean of the finite values
    with its 95% confidence interval."""
    figure, axes = panels(7.2, 1.3 + 0.55 * len(samples), grid="x")
    for row, (record, every) in enumerate(zip(samples, values.values(), strict=True)):
        finite = [value for value in every if math.isfinite(value)]
        style: dict[str, Any] = {"color": line_style(row)["color"]}
        axes.plot(finite, [row + 0.14] * len(finite), "o", **style, alpha=0.55, ms=5, mew=0)
        axes.plot([record["mean"]], [row - 0.14], "D", **style, ms=6)
        axes.plot(record["95% interval"], [row - 0.14] * 2, "-|", **style, lw=2, ms=9, mew=2)
    labels = [plain(f"{name} ({len(of)})") for name, of in values.items()]
    axes.set_yticks(range(len(samples)), labels)
    axes.set(ylim=(len(samples) - 0.5, -0.5), ylabel="model (runs)", xlabel="test perplexity")
    axes.set_title("dots: runs; diamond: mean with its 95% confidence interval", fontsize=9)
    return figure


COMMAND = Measurement(
    "significance",
    "t-tests between the seeds of models",
    measure,
    (
        Argument("--table", "CSV file with a line for each run", metavar="FILE", required=True),
        Argument("--model", "column of the table with the names", "model", metavar="COLUMN"),
    ),
)
