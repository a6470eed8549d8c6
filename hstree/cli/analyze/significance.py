"""``hstree analyze significance``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ..results import add_output_argument, publish, results_folder

_DESCRIPTION = """\
Do models differ, or is it the seed? Unpaired two-sided t-tests between the test perplexities of the
seeds of each model, Welch's (variances may differ) and Student's (they are equal), with Holm's
correction for the number of pairs, differences of means with 95% confidence intervals, and a
picture of all values. Runs that differ in the seed alone are a model; or the values are a column of
a CSV file, such as the one that hstree study writes.
"""

_MODEL, _VALUE = "model", "test_perplexity"


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "significance", help="t-tests between the seeds of models", description=_DESCRIPTION
    )
    parser.add_argument("directories", metavar="RUN", nargs="*", help="run folders of hstree train")
    parser.add_argument(
        "--table", metavar="FILE", help="instead of runs: a CSV file with a line for each of them"
    )
    parser.add_argument(
        "--model", metavar="COLUMN", help=f"of the table: names of models (default: {_MODEL})"
    )
    parser.add_argument(
        "--value", metavar="COLUMN", help=f"of the table: what is tested (default: {_VALUE})"
    )
    add_output_argument(parser, "significance")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.analysis import significance, significance_plot, significance_tables

    notes: list[str] = []
    if arguments.table is None:
        quantity = "test perplexity"
        values = _of_runs(arguments, notes)
    else:
        quantity = (arguments.value or _VALUE).replace("_", " ")
        values = _of_table(arguments, notes)
    result = significance(values)
    publish(
        results_folder(arguments),
        "significance",
        f"Significance of differences in {quantity}",
        significance_tables(result, quantity),
        dataclasses.asdict(result),
        {"significance.png": significance_plot(result, quantity)},
        [*notes, *result.notes],
        rows=[_row(pair) for pair in result.pairs],
    )
    return 0


def _of_runs(arguments: argparse.Namespace, notes: list[str]) -> dict[str, list[float]]:
    from hstree.analysis import compare, model_perplexities
    from hstree.training import TrainConfig

    for name in ("model", "value"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: has no effect without --table")
    if not arguments.directories:
        raise ValueError("expected run folders or --table FILE, got neither")
    comparison = compare(arguments.directories, dataclasses.asdict(TrainConfig()))
    values = model_perplexities(comparison)
    for name, group in zip(values, (g for g in comparison.groups if g.finished), strict=True):
        if comparison.differing:
            notes.append(f"{name}: {group.description}")
    notes += comparison.notes
    return values


def _of_table(arguments: argparse.Namespace, notes: list[str]) -> dict[str, list[float]]:
    from ..columns import read_columns

    if arguments.directories:
        raise ValueError(f"--table: expected this or runs, got both: {arguments.directories[0]}")
    columns, left_out = read_columns(
        arguments.table,
        {"--model": arguments.model or _MODEL},
        {"--value": arguments.value or _VALUE},
    )
    if left_out:
        lines = "1 line" if left_out == 1 else f"{left_out} lines"
        notes.append(f"{lines} of {arguments.table} left out: an empty cell")
    values: dict[str, list[float]] = {}
    for model, value in zip(columns["--model"], columns["--value"], strict=True):
        values.setdefault(model, []).append(value)
    return values


def _row(pair: Any) -> dict[str, Any]:
    welch, student = pair.welch, pair.student
    return {
        "first": pair.first,
        "second": pair.second,
        "difference": welch.difference,
        "welch_low": welch.low,
        "welch_high": welch.high,
        "welch_t": welch.statistic,
        "welch_degrees_of_freedom": welch.degrees_of_freedom,
        "welch_p": welch.p_value,
        "welch_p_holm": pair.welch_corrected,
        "student_t": student.statistic,
        "student_degrees_of_freedom": student.degrees_of_freedom,
        "student_p": student.p_value,
        "student_p_holm": pair.student_corrected,
    }
