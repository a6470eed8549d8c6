"""``hstree compare``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hstree._figures import FORMATS

from .printing import print_tables

_DESCRIPTION = """\
Runs side by side: heads, settings that differ, best validation and test perplexity, parameters,
medians of the seconds of an epoch and of the training tokens a second. Runs that differ in the seed
alone form a group, with mean and standard deviation; hstree analyze significance tests whether
groups differ. Runs that have not finished are shown with what they have.
"""


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

    from hstree._files import write_atomic
    from hstree.analysis import compare, tables, to_csv, to_markdown, validation_curves
    from hstree.training import TrainConfig

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
        notes = list(comparison.notes)
        if sum(len(group.finished) > 1 for group in comparison.groups) > 1:
            notes.append("whether groups differ by more than chance: hstree analyze significance")
        print_tables(tables(comparison), notes)
    if picture is not None:
        write_atomic(picture, validation_curves(comparison, picture.suffix.lower().lstrip(".")))
        print(f"validation curves drawn in {picture}", file=sys.stderr)
    return 0
