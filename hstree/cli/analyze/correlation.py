"""``hstree analyze correlation``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from ..results import add_output_argument, publish, results_folder

_DESCRIPTION = """\
Does one figure of a model go with another? Pearson's and Spearman's correlation of two columns of a
CSV file, such as the ranks and perplexities of the runs of hstree study, with and without outliers,
and a picture of the points. Outliers are points whose x or y lies more than 1.5 interquartile
ranges below the first or above the third quartile (Tukey).
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "correlation", help="rank against perplexity, over many runs", description=_DESCRIPTION
    )
    parser.add_argument("table", metavar="FILE", help="CSV file with a line for each run")
    for name, default, text in (
        ("x", "press_rank", "what goes to the right"),
        ("y", "test_perplexity", "what goes up"),
    ):
        parser.add_argument(
            f"--{name}", metavar="COLUMN", default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--label",
        metavar="COLUMN",
        action="append",
        default=[],
        help="text beside outliers, and beside all of few points; may be repeated",
    )
    parser.add_argument(
        "--group",
        metavar="COLUMN",
        help="what the colours tell: a scale if the column holds numbers, else a legend",
    )
    add_output_argument(parser, "correlation")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hstree.analysis import correlation, correlation_plot, correlation_table
    from hstree.analysis.correlation import FENCE

    from ..columns import read_columns

    texts = {f"--label {name}": name for name in arguments.label}
    if arguments.group is not None:
        texts["--group"] = arguments.group
    columns, empty = read_columns(arguments.table, texts, {"--x": arguments.x, "--y": arguments.y})
    points = zip(columns["--x"], columns["--y"], strict=True)
    finite = [all(map(math.isfinite, point)) for point in points]
    kept = {
        flag: [cell for cell, keep in zip(cells, finite, strict=True) if keep]
        for flag, cells in columns.items()
    }
    try:
        result = correlation(kept["--x"], kept["--y"])
    except ValueError as error:
        raise ValueError(
            f"{arguments.table}, x = {arguments.x}, y = {arguments.y}: {error}"
        ) from None
    labels = _labels(kept, arguments.label)
    x, y = _words(arguments.x), _words(arguments.y)
    notes = [
        f"outliers: points whose x or y lies more than {FENCE} interquartile ranges below the "
        f"first or above the third quartile (Tukey); here {result.outliers} of {len(result.x)}"
    ]
    if result.inner is None:
        notes.append("without outliers too few points, or points that do not vary, are left")
    for count, reason in ((empty, "an empty cell"), (finite.count(False), "nan or infinity")):
        if count:
            lines = "1 line" if count == 1 else f"{count} lines"
            notes.append(f"{lines} of {arguments.table} left out: {reason}")
    publish(
        results_folder(arguments),
        "correlation",
        f"{x[:1].upper()}{x[1:]} against {y}",
        [correlation_table(result, x, y)],
        {"x": arguments.x, "y": arguments.y, "left_out": empty + finite.count(False)}
        | {"all": dataclasses.asdict(result.overall)}
        | {"without_outliers": None if result.inner is None else dataclasses.asdict(result.inner)},
        {
            "correlation.png": correlation_plot(
                result, x, y, labels, kept.get("--group"), arguments.group or ""
            )
        },
        notes,
        rows=[
            {"label": label, arguments.x: a, arguments.y: b, "outlier": str(outlier).lower()}
            for label, a, b, outlier in zip(
                labels or [""] * len(result.x), result.x, result.y, result.outlier, strict=True
            )
        ],
    )
    return 0


def _words(column: str) -> str:
    """The name of a column as words; Press is a person."""
    return column.replace("_", " ").replace("press rank", "Press rank")


def _labels(columns: dict[str, list[Any]], names: list[str]) -> list[str] | None:
    """Text for each point: the cell of the one column, or ``name=cell`` of several."""
    if not names:
        return None
    cells = zip(*(columns[f"--label {name}"] for name in names), strict=True)
    if len(names) == 1:
        return [cell for (cell,) in cells]
    return [", ".join(map("=".join, zip(names, line, strict=True))) for line in cells]
