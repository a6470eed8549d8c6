"""``hstree analyze significance``."""

from __future__ import annotations

import argparse
import math
from typing import Any

from hstree.lm._arguments import Argument
from hstree.lm._pictures import line_style, panels, plain
from hstree.lm.table import Column, Table, count, decimals, number, probability, table

from ..columns import read_columns, skipped
from ..comparison.compute import compare
from ..report import Report, matrix_table
from ..runner import Measurement
from .compute import PairTest, Significance, model_perplexities, significance_tests

_MODEL, _VALUE = "model", "test_perplexity"


def measure(arguments: argparse.Namespace) -> Report:
    quantity = "test perplexity"
    if arguments.table is None:
        values, notes = _of_runs(arguments)
    else:
        quantity = (arguments.value or _VALUE).replace("_", " ")
        values, notes = _of_table(arguments)
    result = significance_tests(values)
    return Report(
        f"Significance of differences in {quantity}",
        significance_tables(result, quantity),
        [*notes, *result.notes],
        result,
        [_row(pair) for pair in result.pairs],
        {"": significance_picture(result, quantity)},
    )


def _of_runs(arguments: argparse.Namespace) -> tuple[dict[str, list[float]], list[str]]:
    for name in ("model", "value"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: has no effect without --table")
    if not arguments.directories:
        raise ValueError("expected run folders or --table FILE, got neither")
    comparison = compare(arguments.directories)
    values = model_perplexities(comparison)
    finished = [group for group in comparison.groups if group.finished]
    described = [f"{n}: {g.description}" for n, g in zip(values, finished, strict=True)]
    return values, [*(described if comparison.differing else ()), *comparison.notes]


def _of_table(arguments: argparse.Namespace) -> tuple[dict[str, list[float]], list[str]]:
    if arguments.directories:
        raise ValueError(
            f"--table: expected either a table or runs, got both: {arguments.directories[0]}"
        )
    lines, left_out = read_columns(
        arguments.table,
        {"--model": arguments.model or _MODEL},
        {"--value": arguments.value or _VALUE},
    )
    values: dict[str, list[float]] = {}
    for line in lines:
        values.setdefault(line["--model"], []).append(line["--value"])
    return values, skipped(left_out, arguments.table, "an empty cell")


def significance_tables(result: Significance, quantity: str) -> list[Table]:
    three = decimals(3)
    tested = sum(not math.isnan(pair.welch.p_value) for pair in result.pairs)
    samples: list[Column] = [
        ("model", lambda sample: sample.name),
        ("n", lambda sample: len(sample.values), count),
        ("mean", lambda sample: sample.mean, three),
        ("SD", lambda sample: sample.deviation, three),
        ("95% interval", lambda sample: sample, _interval),
        ("least", lambda sample: min(sample.values), three),
        ("greatest", lambda sample: max(sample.values), three),
    ]
    pairs: list[Column] = [
        ("models", lambda pair: f"{pair.first} - {pair.second}"),
        ("difference of means", lambda pair: pair.welch.difference, number("+.3f")),
        ("95% interval", lambda pair: pair.welch, _interval),
        *_test_columns("Welch"),
        *_test_columns("Student"),
    ]
    p = {(pair.first, pair.second): pair.welch_corrected for pair in result.pairs}
    p |= {(pair.second, pair.first): pair.welch.p_value for pair in result.pairs}
    names = list(dict.fromkeys(name for pair in result.pairs for name in (pair.first, pair.second)))
    matrix = [[p.get((row, name), math.nan) for name in names] for row in names]
    of_models = f"{quantity[:1].upper()}{quantity[1:]} of each model over its seeds"
    of_pairs = (
        f"Unpaired two-sided t-tests of equal mean {quantity}; Holm: corrected for {tested} "
        f"test{'s' * (tested != 1)}"
    )
    p_values = "p-values of Welch's test: above the diagonal after Holm's correction, below without"
    return [
        table(of_models, result.samples, samples),
        table(of_pairs, result.pairs, pairs),
        matrix_table(p_values, names, matrix, probability),
    ]


def _test_columns(name: str) -> list[Column]:
    test = name.lower()
    return [
        (f"{name} t", lambda pair: getattr(pair, test).statistic, decimals(2)),
        (f"{name} df", lambda pair: getattr(pair, test).degrees_of_freedom, decimals(1)),
        (f"{name} p", lambda pair: getattr(pair, test).p_value, probability),
        (f"{name} p, Holm", lambda pair: getattr(pair, f"{test}_corrected"), probability),
    ]


def _interval(of: Any) -> str:
    return "-" if math.isnan(of.low) else f"{of.low:,.3f} to {of.high:,.3f}"


def _row(pair: PairTest) -> dict[str, Any]:
    row: dict[str, Any] = {"first": pair.first, "second": pair.second}
    row["difference"] = pair.welch.difference
    row |= {"welch_low": pair.welch.low, "welch_high": pair.welch.high}
    for name, test in (("welch", pair.welch), ("student", pair.student)):
        row |= {f"{name}_t": test.statistic, f"{name}_degrees_of_freedom": test.degrees_of_freedom}
        row |= {f"{name}_p": test.p_value, f"{name}_p_holm": getattr(pair, f"{name}_corrected")}
    return row


def significance_picture(result: Significance, quantity: str) -> Any:
    """Plot a row for each model: a dot for each seed, and above the dots the mean of the finite
    values with its 95% confidence interval. ``quantity``: label of the axis."""
    samples = result.samples
    figure, axes = panels(7.2, 1.3 + 0.55 * len(samples), grid="x")
    for row, sample in enumerate(samples):
        colour = line_style(row)["color"]
        values = [value for value in sample.values if math.isfinite(value)]
        axes.plot(values, [row + 0.14] * len(values), "o", color=colour, alpha=0.55, ms=5, mew=0)
        if math.isfinite(sample.mean):
            axes.plot([sample.mean], [row - 0.14], "D", color=colour, ms=6)
        if math.isfinite(sample.low):
            ends = [sample.low, sample.high]
            axes.plot(ends, [row - 0.14] * 2, "-|", color=colour, lw=2, ms=9, mew=2)
    labels = [plain(f"{sample.name} ({len(sample.values)})") for sample in samples]
    axes.set_yticks(range(len(samples)), labels)
    axes.set(ylim=(len(samples) - 0.5, -0.5), ylabel="model (runs)", xlabel=plain(quantity))
    axes.set_title("dots: runs; diamond: mean with its 95% confidence interval", fontsize=9)
    return figure


COMMAND = Measurement(
    "significance",
    "t-tests between the seeds of models",
    """\
Test whether models differ by more than chance: unpaired two-sided t-tests between the test
perplexities of the seeds of each model, Welch's (for different variances) and Student's (for equal
ones), with Holm's correction for the number of pairs, differences of means with 95% confidence
intervals, and a plot of all values. Runs that differ only in the seed are one model. Alternatively,
the values are a column of a CSV file, such as the one that hstree study writes.
""",
    measure,
    (
        Argument("--table", "instead of runs: a CSV file with a line for each run", metavar="FILE"),
        Argument(
            "--model",
            f"column of the table with the names of the models (default: {_MODEL})",
            metavar="COLUMN",
        ),
        Argument("--value", f"column of the table to test (default: {_VALUE})", metavar="COLUMN"),
    ),
    runs="*",
)
