"""``hstree study``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from hstree._arguments import count
from hstree._files import write_atomic
from hstree.laboratory.runner import output_folder
from hstree.laboratory.study.file import EXAMPLE, read_study
from hstree.laboratory.study.report import study_report
from hstree.laboratory.study.runs import StudyRun, run_study, seconds_left, study_runs
from hstree.laboratory.table import table
from hstree.laboratory.terminal import print_tables
from hstree.training import ConsoleReporter

_DESCRIPTION = """\
Train a grid of models, heads by seeds by settings, that one small TOML file describes, and put them
into one table: study.md and study.tex with a row for each model (perplexities as mean and standard
deviation over the seeds, p-value against a baseline, parameters, seconds of an epoch, ranks of the
log-probabilities), study.csv with a row for each run. The tables are written anew after every run.
Stopped in whatever way, the same command goes on; runs that have finished are not made again, nor
is one whose training failed, until its folder is removed.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "study",
        help="a grid of runs in one table",
        description=_DESCRIPTION,
        epilog=f"the study:\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the study, a TOML file; see below")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder of the study: its runs and tables (default: studies/NAME)",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="end after N more runs")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and how far they are, and exit"
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("hstree study: expected a single process, not one of torchrun")
    study = read_study(arguments.file)
    output = arguments.output or str(Path("studies", study.name))
    if arguments.dry_run:
        _list(study_runs(study, Path(output)))
        return 0
    with output_folder(output) as folder:

        def write(runs: Sequence[StudyRun]) -> None:
            command = f"hstree study {Path(arguments.file).name}"
            for name, content in study_report(study, runs).content("study", command).items():
                write_atomic(folder / name, content)

        runs = run_study(
            study, folder, limit=arguments.limit, reporter=ConsoleReporter, changed=write
        )
    report = study_report(study, runs)
    print()
    print_tables(report.tables, report.notes)
    print(f"written to {folder}: study.md, study.tex, study.csv")
    return 1 if any(run.state == "failed" for run in runs) else 0


def _list(runs: Sequence[StudyRun]) -> None:
    left = seconds_left(runs)
    columns = [("run", attrgetter("path.name")), ("state", attrgetter("state"))]
    notes = [f"about {left / 60:.0f} min of training are left"] if left else []
    print_tables([table(f"{len(runs)} runs", runs, columns)], notes)
