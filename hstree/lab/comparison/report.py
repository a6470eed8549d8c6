"""Tables that compare runs, and ``hstree compare``, which prints them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from hstree._files import write_atomic
from hstree.lm._arguments import Argument, output_file
from hstree.lm._packages import optional_package
from hstree.lm._pictures import FORMATS, legend, line_style, panels, perplexity_axes, picture, plain
from hstree.lm._terminal import show
from hstree.lm.print_tables import print_tables
from hstree.lm.runs import RunResults
from hstree.lm.runs.flags import add_run_argument
from hstree.lm.table import Column, Table, count, csv_text, decimals, markdown, table, text

from .compute import (
    Comparison,
    RunGroup,
    compare,
    mean_and_deviation,
    read_settings,
    setting_texts,
)

_TWO = decimals(2)
_FIGURES: dict[str, Column] = {
    "best_epoch": ("best epoch", lambda run: run.best_epoch, text),
    "valid_perplexity": ("valid perplexity", lambda run: run.valid_perplexity, _TWO),
    "test_perplexity": ("test perplexity", lambda run: run.test_perplexity, _TWO),
    "backbone_parameters": (
        "backbone parameters",
        lambda run: run.final and run.final.backbone_parameters,
        count,
    ),
    "head_parameters": (
        "head parameters",
        lambda run: run.final and run.final.head_parameters,
        count,
    ),
    "seconds_per_epoch": ("s per epoch", lambda run: run.seconds_per_epoch, decimals(1)),
    "tokens_per_second": ("tokens/s", lambda run: run.tokens_per_second, decimals(0)),
}
"""Columns of the table of runs, by their names in the CSV file."""


def comparison_tables(comparison: Comparison) -> tuple[Table, ...]:
    """A table of the runs and, if any group has several runs, one of the groups."""
    columns: list[Column] = [
        ("run", lambda run: run.path),
        ("head", lambda run: run.head),
        ("seed", lambda run: run.seed, text),
        ("epochs", _epochs, str),
        *_FIGURES.values(),
    ]
    if comparison.differing:
        names = comparison.differing
        columns.insert(3, ("settings that differ", lambda r: ", ".join(setting_texts(r, names))))
    if not comparison.repeated:
        return (table("Runs", comparison.runs, columns),)
    columns.insert(0, ("group", comparison.label))
    return (
        table("Runs", comparison.runs, columns),
        table(
            "Perplexity of finished runs, mean and standard deviation over seeds",
            comparison.groups,
            [
                ("group", lambda group: group.label),
                ("model", lambda group: group.description),
                ("finished", lambda group: f"{len(group.finished)} of {len(group.runs)}", str),
                ("valid, mean", lambda group: _over(group, "valid", "mean"), _TWO),
                ("valid, SD", lambda group: _over(group, "valid", "deviation"), _TWO),
                ("test, mean", lambda group: _over(group, "test", "mean"), _TWO),
                ("test, SD", lambda group: _over(group, "test", "deviation"), _TWO),
            ],
        ),
    )


def _epochs(run: RunResults) -> str:
    return (
        f"{len(run.epochs)} of {run.config.epochs}" if run.final is None else f"{len(run.epochs)}"
    )


def _over(group: RunGroup, split: str, measure: str) -> float | None:
    summary = mean_and_deviation(getattr(group, f"{split}_perplexities"))
    return None if summary is None else getattr(summary, measure)


def to_markdown(comparison: Comparison) -> str:
    """The tables and notes in Markdown."""
    return markdown(comparison_tables(comparison), comparison.notes)


def to_csv(comparison: Comparison) -> str:
    """The runs as CSV with a header, with unrounded numbers and a column for each setting that
    differs. Missing values are empty cells."""
    return csv_text([_csv_row(comparison, run) for run in comparison.runs])


def _csv_row(comparison: Comparison, run: RunResults) -> dict[str, Any]:
    settings = dict.fromkeys(comparison.differing) | read_settings(run, comparison.differing)
    return {
        "group": comparison.label(run),
        "run": str(run.path),
        "head": run.head,
        "seed": run.seed,
        **{
            name: json.dumps(value) if isinstance(value, (bool, list)) else value
            for name, value in settings.items()
        },
        "finished": json.dumps(run.final is not None),
        "epochs_ended": len(run.epochs),
        **{name: column[1](run) for name, column in _FIGURES.items()},
    }


_DESCRIPTION = """\
Compare runs: heads, settings that differ, best validation and test perplexity, parameters, median
seconds per epoch and median training tokens per second. Runs that differ only in the seed form a
group, with mean and standard deviation; hstree analyze significance tests whether groups differ.
Unfinished runs are shown with their results so far.
"""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("compare", help="compare runs", description=_DESCRIPTION)
    add_run_argument(parser, "+")
    Argument(
        "--format",
        "output format; csv has only the runs, in full precision",
        "table",
        choices=("table", "markdown", "csv"),
    ).add(parser)
    Argument(
        "--plot", "plot the validation curves to this .png, .pdf or .svg file", metavar="FILE"
    ).add(parser)
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    file = None
    if arguments.plot is not None:
        file = output_file("--plot", arguments.plot, *(f".{name}" for name in FORMATS))
        optional_package("matplotlib", "--plot", "lm")
    comparison = compare(arguments.directories)
    if file is not None and not any(run.epochs for run in comparison.runs):
        raise ValueError("--plot: none of these runs has a completed epoch")
    if arguments.format == "csv":
        show(to_csv(comparison), end="")
    elif arguments.format == "markdown":
        show(to_markdown(comparison), end="")
    else:
        notes = list(comparison.notes)
        if sum(len(group.finished) > 1 for group in comparison.groups) > 1:
            notes.append("whether groups differ by more than chance: hstree analyze significance")
        print_tables(comparison_tables(comparison), notes)
    if file is not None:
        content = picture(validation_curves(comparison), file.suffix.lower().lstrip("."))
        write_atomic(file, content)
        show(f"validation curves drawn in {file}", file=sys.stderr)
    return 0


def validation_curves(comparison: Comparison) -> Any:
    """Plot validation perplexity by epoch, one line for each run.

    Runs of a group share a color and a legend entry. A dot marks the best epoch of a run, an open
    diamond the first epoch with averaged weights.

    Raises:
        ValueError: no run has a completed epoch.
    """
    groups = [group for group in comparison.groups if any(run.epochs for run in group.runs)]
    if not groups:
        raise ValueError("comparison: expected a run with at least one completed epoch, got none")
    figure, axes = panels(7.2, 4.4 + 0.2 * len(groups))
    caption = "dot: best epoch"
    for number, group in enumerate(groups):
        style, label = line_style(number), _label(comparison, group)
        for i, run in enumerate(run for run in group.runs if run.epochs):
            curve = {
                e.epoch: e.valid_perplexity if math.isfinite(e.valid_perplexity) else math.nan
                for e in run.epochs
            }
            axes.plot([*curve], [*curve.values()], **style, lw=1.4, label=None if i else label)
            assert run.best is not None
            axes.plot(run.best.epoch, curve[run.best.epoch], "o", color=style["color"], ms=4)
            averaged = next((e.epoch for e in run.epochs if e.averaged), None)
            if averaged is not None:
                axes.plot(averaged, curve[averaged], "D", mfc="white", mec=style["color"], ms=6)
                caption = "dot: best epoch, diamond: first epoch of averaged weights"
    perplexity_axes(axes)
    axes.set_ylabel("validation perplexity per token (log scale)")
    axes.set_title(caption, fontsize=9)
    legend(figure)
    return figure


def _label(comparison: Comparison, group: RunGroup) -> str:
    text = f"{group.runs[0].path}: {group.head}"
    if comparison.repeated:
        runs = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"
        text = f"{group.label}: {group.description} ({runs})"
    return plain(text if len(text) <= 100 else text[:99] + "\N{HORIZONTAL ELLIPSIS}")
