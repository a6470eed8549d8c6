"""``hstree compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hstree.analysis import Comparison

_DESCRIPTION = """\
Runs side by side: heads, settings that differ, best validation and test perplexity, parameters,
medians of the seconds of an epoch and of the training tokens a second. Runs that differ in the seed
alone form a group, with mean and standard deviation; groups of at least two finished runs are
compared by unpaired t-tests of their test perplexities (Welch: variances may differ; Student: they
are equal). Runs that have not finished are shown with what they have.
"""


_NARROW, _BROAD = 16, 48  # characters to which a column of text may shrink and grow


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser("compare", help="runs side by side", description=_DESCRIPTION)
    parser.add_argument("directories", metavar="RUN", nargs="+", help="run folders of hstree train")
    parser.add_argument(
        "--format",
        choices=("table", "markdown", "csv"),
        default="table",
        help="what to print; csv holds the runs alone, in full digits (default: table)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw the validation curves in this .png, .pdf or .svg",
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    import dataclasses
    import sys

    from hstree.analysis import compare, to_csv, to_markdown, validation_curves
    from hstree.analysis.curves import FORMATS
    from hstree.training import TrainConfig
    from hstree.training.run_directory import write_atomic

    picture = None if arguments.plot is None else Path(arguments.plot)
    if picture is not None:
        if picture.suffix.lower().lstrip(".") not in FORMATS:
            raise ValueError(
                f"--plot: expected a name that ends in .png, .pdf or .svg, got {picture}"
            )
        if not picture.absolute().parent.is_dir():
            raise ValueError(f"--plot: there is no folder {picture.parent}")
    comparison = compare(arguments.directories, dataclasses.asdict(TrainConfig()))
    if picture is not None and not any(run.epochs for run in comparison.runs):
        raise ValueError("--plot: no epoch has ended in any of these runs")
    if arguments.format == "csv":
        print(to_csv(comparison), end="")
    elif arguments.format == "markdown":
        print(to_markdown(comparison), end="")
    else:
        _print_tables(comparison)
    if picture is not None:
        write_atomic(picture, validation_curves(comparison, picture.suffix.lower().lstrip(".")))
        print(f"validation curves drawn in {picture}", file=sys.stderr)
    return 0


def _print_tables(comparison: Comparison) -> None:
    """Print tables and notes: as wide as the terminal, wider where numbers would not stay whole,
    and at full width where there is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from hstree.analysis import tables

    console = Console()
    wide = console.options.update(width=10_000)
    for content in tables(comparison):
        table = Table(
            box=box.SIMPLE_HEAD,
            title=content.title,
            title_justify="left",
            padding=(0, 1, 0, 0),
            pad_edge=False,
        )
        for name, right, *cells in zip(content.header, content.right, *content.rows, strict=True):
            longest = max(map(len, (name, *cells)))
            table.add_column(
                Text(name.replace(" ", "\n") if right else name),
                justify="right" if right else "left",
                no_wrap=right,
                overflow="fold",
                min_width=None if right else min(longest, _NARROW),
                max_width=None if right else _BROAD,
            )
        for row in content.rows:
            table.add_row(*map(Text, row))
        natural = Measurement.get(console, wide, table).maximum
        least = Measurement.get(console, wide, table).minimum
        width = natural if not console.is_terminal else min(natural, max(console.width, least))
        Console(width=width).print(table)
    for note in comparison.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
