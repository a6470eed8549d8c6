"""Whether models differ by more than chance: unpaired two-sided t-tests over their seeds.

Welch's test (1947, for different variances) and Student's (1908, for equal ones) of equal means,

    t = (m1 - m2) / sqrt(s1^2 / n1 + s2^2 / n2),
    t = (m1 - m2) / sqrt(s^2 (1 / n1 + 1 / n2)),  s^2 the pooled variance,

for all pairs of models, with Holm's correction for the number of pairs (1979), and 95% confidence
intervals of means and differences, as in Parthiban et al., AAAI 2021. The values are the test
perplexities of run folders, of which those that differ only in the seed are one model, or a column
of a CSV file such as the one that hstree study writes.
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

from .comparison import Comparison, compare
from .report import Form, Measurement, Report, read_columns, record_table, row_table, skipped

CONFIDENCE = 0.95
_MODEL, _VALUE = "model", "test_perplexity"


class TTest(NamedTuple):
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
    """Welch's t-test, or with equal variances Student's.

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
            expected = "at least two values for a t-test"
            raise ValueError(f"{name}: expected {expected}, got {len(values)}")
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
    """Welch's and Student's test of two models, and their p-values corrected by :func:`holm` over
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
    notes, tested = [], []
    for sample in samples:
        if len(sample.values) < 2:
            notes.append(f"{sample.name} is not tested: it has one value, a t-test needs two")
        elif not all(map(math.isfinite, sample.values)):
            notes.append(f"{sample.name} is not tested: not all its values are finite")
        else:
            tested.append(sample)
    if len(tested) < 2:
        expected = "expected at least two models with two or more finite values each"
        raise ValueError(f"{expected}, got {len(tested)} of {len(samples)}")
    couples = [*itertools.combinations(tested, 2)]
    welch = [t_test(a.values, b.values) for a, b in couples]
    student = [t_test(a.values, b.values, equal_variances=True) for a, b in couples]
    corrected = [holm([test.p_value for test in tests]) for tests in (welch, student)]
    names = [(a.name, b.name) for a, b in couples]
    tests = zip(names, welch, student, *corrected, strict=True)
    pairs = tuple(PairTest(*couple, *of) for couple, *of in tests)
    for pair in pairs:
        if math.isnan(pair.welch.p_value):
            both = f"{pair.first} and {pair.second}"
            notes.append(f"{both} are not tested: neither varies from seed to seed")
    return Significance(samples, pairs, tuple(notes))


def _sample(name: str, values: Sequence[float]) -> Sample:
    from scipy.stats import t

    if not values:
        raise ValueError(f"{name}: expected at least one value, got none")
    n, mean, low, high = len(values), sum(values) / len(values), math.nan, math.nan
    varies = n > 1 and all(map(math.isfinite, values))
    deviation = statistics.stdev(values) if varies else math.nan
    if deviation > 0:
        low, high = map(float, t.interval(CONFIDENCE, n - 1, mean, deviation / math.sqrt(n)))
    return Sample(name, tuple(values), mean, deviation, low, high)


def model_perplexities(comparison: Comparison) -> dict[str, list[float]]:
    """The test perplexities of the finished runs of each group, for :func:`significance_tests`, by
    the head, or with its settings if another group has the same head. Raises ValueError if the
    finished runs are on different texts."""
    finals = {
        name: [run.final for run in runs if run.final] for name, runs in comparison.groups.items()
    }
    if len({final.text for group in finals.values() for final in group}) > 1:
        message = "the runs differ in text or vocabulary: their perplexities are not comparable"
        raise ValueError(message)
    groups = {name: [f.test_perplexity for f in group] for name, group in finals.items() if group}
    heads = [name.partition(",")[0] for name in groups]
    names = [head if heads.count(head) == 1 else n for head, n in zip(heads, groups, strict=True)]
    return dict(zip(names, groups.values(), strict=True))


def measure(arguments: argparse.Namespace) -> Report:
    quantity = "test perplexity"
    if arguments.table is None:
        for name in ("model", "value"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name}: has no effect without --table")
        if not arguments.directories:
            raise ValueError("expected run folders or --table FILE, got neither")
        comparison = compare(arguments.directories)
        values, notes = model_perplexities(comparison), list(comparison.notes)
    else:
        if arguments.directories:
            got = arguments.directories[0]
            raise ValueError(f"--table: expected either a table or runs, got both: {got}")
        model, value = arguments.model or _MODEL, arguments.value or _VALUE
        lines, left_out = read_columns(arguments.table, {"--model": model}, {"--value": value})
        notes, values = skipped(left_out, arguments.table, "an empty cell"), {}
        for line in lines:
            values.setdefault(line["--model"], []).append(line["--value"])
        quantity = value.replace("_", " ")
    result = significance_tests(values)
    rows = []
    for pair in result.pairs:
        row = {"first": pair.first, "second": pair.second, "difference": pair.welch.difference}
        row |= {"welch_low": pair.welch.low, "welch_high": pair.welch.high}
        for name in ("welch", "student"):
            test, holm_p = getattr(pair, name), getattr(pair, f"{name}_corrected")
            row |= {f"{name}_t": test.statistic}
            row |= {f"{name}_degrees_of_freedom": test.degrees_of_freedom}
            row |= {f"{name}_p": test.p_value, f"{name}_p_holm": holm_p}
        rows.append(row)
    return Report(
        f"Significance of differences in {quantity}",
        significance_tables(result, quantity),
        [*notes, *result.notes],
        result,
        rows,
        {"": significance_picture(result, quantity)},
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


COLUMN = "column of the table"
COMMAND = Measurement(
    "significance",
    "t-tests between the seeds of models",
    measure,
    (
        Argument("--table", "instead of runs: a CSV file with a line for each run", metavar="FILE"),
        Argument("--model", f"{COLUMN} with the names (default: {_MODEL})", metavar="COLUMN"),
        Argument("--value", f"{COLUMN} to test (default: {_VALUE})", metavar="COLUMN"),
    ),
    runs="*",
)
