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

from .report import Form, Measurement, Report, read_columns, record_table, row_table, skipped

CONFIDENCE = 0.95


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


class Sample(NamedTuple):
    """The values of a model, one for each seed; their mean; their standard deviation, with n - 1 in
    the denominator, nan for a single value or if one is not finite; and the 95% confidence interval
    of the mean, mean -+ t_{n-1} deviation / sqrt(n), nan if the deviation is nan or 0."""

    name: str
    values: tuple[float, ...]
    mean: float
    deviation: float
    low: float
    high: float


class PairTest(NamedTuple):
    """Two models, Welch's and Student's test, and their p-values corrected by :func:`holm` over
    all pairs."""

    first: str
    second: str
    welch: TTest
    student: TTest
    welch_corrected: float
    student_corrected: float


class Significance(NamedTuple):
    """The models, a test for each pair that can be tested, and notes, one sentence each."""

    samples: tuple[Sample, ...]
    pairs: tuple[PairTest, ...]
    notes: tuple[str, ...]


def significance_tests(values: Mapping[str, Sequence[float]]) -> Significance:
    """Test every pair of models for a difference of the means of their values, one for each seed,
    such as test perplexities. A model with fewer than two values, or with one that is not finite,
    is listed but not tested. Raises ValueError if fewer than two models can be tested."""
    samples = tuple(_sample(name, numbers) for name, numbers in values.items())
    tested = [s for s in samples if len(s.values) > 1 and math.isfinite(s.mean)]
    notes = [
        f"{sample.name} is not tested: "
        + ("not all its values are finite" if len(sample.values) > 1 else "it has one value")
        for sample in samples
        if sample not in tested
    ]
    if len(tested) < 2:
        expected = "expected at least two models with two or more finite values each"
        raise ValueError(f"{expected}, got {len(tested)} of {len(samples)}")
    couples = [*itertools.combinations(tested, 2)]
    welch = [t_test(a.values, b.values) for a, b in couples]
    student = [t_test(a.values, b.values, equal_variances=True) for a, b in couples]
    corrected = [holm([test.p_value for test in tests]) for tests in (welch, student)]
    tests = zip(couples, welch, student, *corrected, strict=True)
    pairs = tuple(PairTest(a.name, b.name, *of) for (a, b), *of in tests)
    notes += [
        f"{pair.first} and {pair.second} are not tested: neither varies from seed to seed"
        for pair in pairs
        if math.isnan(pair.welch.p_value)
    ]
    return Significance(samples, pairs, tuple(notes))


def _sample(name: str, values: Sequence[float]) -> Sample:
    from scipy.stats import t

    n, mean, low, high = len(values), sum(values) / len(values), math.nan, math.nan
    deviation = statistics.stdev(values) if n > 1 and math.isfinite(mean) else math.nan
    if deviation > 0:
        low, high = map(float, t.interval(CONFIDENCE, n - 1, mean, deviation / math.sqrt(n)))
    return Sample(name, tuple(values), mean, deviation, low, high)


def measure(arguments: argparse.Namespace) -> Report:
    columns = {"--model": arguments.model}, {"--value": arguments.value}
    lines, left_out = read_columns(arguments.table, *columns)
    values: dict[str, list[float]] = {}
    for line in lines:
        values.setdefault(line["--model"], []).append(line["--value"])
    notes, quantity = (
        skipped(left_out, arguments.table, "an empty cell"),
        arguments.value.replace("_", " "),
    )
    result = significance_tests(values)
    return Report(
        f"Significance of differences in {quantity}",
        significance_tables(result, quantity),
        [*notes, *result.notes],
        result,
        pictures={"": significance_picture(result, quantity)},
    )


def significance_tables(result: Significance, quantity: str) -> list[Table]:
    tested = sum(not math.isnan(pair.welch.p_value) for pair in result.pairs)
    samples = [
        {"model": s.name, "n": len(s.values), "mean": s.mean, "SD": s.deviation}
        | {"95% interval": _interval(s), "least": min(s.values), "greatest": max(s.values)}
        for s in result.samples
    ]
    pairs = []
    for pair in result.pairs:
        row: dict[str, Any] = {"models": f"{pair.first} - {pair.second}"}
        row |= {"difference of means": pair.welch.difference, "95% interval": _interval(pair.welch)}
        for name in ("Welch", "Student"):
            test: TTest = getattr(pair, name.lower())
            row |= {f"{name} t": test.statistic, f"{name} df": test.degrees_of_freedom}
            row[f"{name} p"] = test.p_value
            row[f"{name} p, Holm"] = getattr(pair, f"{name.lower()}_corrected")
        pairs.append(row)
    forms: dict[str, Form] = {"difference of means": "+.3f", "95% interval": str}
    forms |= dict.fromkeys(("mean", "SD", "least", "greatest"), ",.3f")
    forms |= {key: probability for key in pairs[0] if " p" in key}
    forms |= {key: ",.2f" for key in pairs[0] if key.endswith(" t")}
    forms |= {key: ",.1f" for key in pairs[0] if key.endswith(" df")}
    p = {(pair.first, pair.second): pair.welch_corrected for pair in result.pairs}
    p |= {(pair.second, pair.first): pair.welch.p_value for pair in result.pairs}
    names = [*dict.fromkeys(name for pair in result.pairs for name in pair[:2])]
    matrix = [[row, *(p.get((row, name), math.nan) for name in names)] for row in names]
    of_pairs = f"Unpaired two-sided t-tests of equal mean {quantity}; Holm: corrected for {tested} "
    p_values = "p-values of Welch's test: above the diagonal after Holm's correction, below without"
    of_models = f"{quantity[:1].upper()}{quantity[1:]} of each model over its seeds"
    return [
        record_table(of_models, samples, forms),
        record_table(f"{of_pairs}test{'s' * (tested != 1)}", pairs, forms),
        row_table(p_values, ("model", *names), matrix, None, probability),
    ]


def _interval(of: Sample | TTest) -> str:
    return "-" if math.isnan(of.low) else f"{of.low:,.3f} to {of.high:,.3f}"


def significance_picture(result: Significance, quantity: str) -> Any:
    """A row for each model: a dot for each seed, and above the dots the mean of the finite values
    with its 95% confidence interval. ``quantity``: label of the axis."""
    samples = result.samples
    figure, axes = panels(7.2, 1.3 + 0.55 * len(samples), grid="x")
    for row, sample in enumerate(samples):
        colour = line_style(row)["color"]
        values = [value for value in sample.values if math.isfinite(value)]
        axes.plot(values, [row + 0.14] * len(values), "o", color=colour, alpha=0.55, ms=5, mew=0)
        if math.isfinite(sample.mean):
            axes.plot([sample.mean], [row - 0.14], "D", color=colour, ms=6)
        if math.isfinite(sample.low):
            axes.plot(sample[4:], [row - 0.14] * 2, "-|", color=colour, lw=2, ms=9, mew=2)
    labels = [plain(f"{sample.name} ({len(sample.values)})") for sample in samples]
    axes.set_yticks(range(len(samples)), labels)
    axes.set(ylim=(len(samples) - 0.5, -0.5), ylabel="model (runs)", xlabel=plain(quantity))
    axes.set_title("dots: runs; diamond: mean with its 95% confidence interval", fontsize=9)
    return figure


COMMAND = Measurement(
    "significance",
    "t-tests between the seeds of models",
    measure,
    (
        Argument("--table", "CSV file with a line for each run", metavar="FILE", required=True),
        Argument("--model", "column of the table with the names", "model", metavar="COLUMN"),
        Argument("--value", "column of the table to test", "test_perplexity", metavar="COLUMN"),
    ),
)
