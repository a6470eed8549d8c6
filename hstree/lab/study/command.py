"""``hstree study``."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from hstree._files import write_together
from hstree._progress import duration
from hstree.lab.runner import output_folder
from hstree.lab.study.engine import Run, seconds_left
from hstree.lab.study.file import EXAMPLE, read_study
from hstree.lab.study.report import study_report
from hstree.lab.study.runs import StudyRun, run_study, study_runs
from hstree.lm._arguments import count
from hstree.lm._terminal import fold, show
from hstree.lm.print_tables import print_tables
from hstree.lm.table import table
from hstree.lm.training import ConsoleReporter

_DESCRIPTION = """\
Train a grid of models (heads, seeds and settings), described by a TOML file,
and collect the results in tables. study.md and study.tex have a row for each
model: mean and standard deviation of the perplexities over the seeds, p-value
against a baseline, parameters, seconds per epoch, ranks of the
log-probabilities. study.csv has a row for each run. The tables are updated
after every run. After an interruption the same command resumes the study. Runs
that have finished or failed are skipped; to repeat one, remove its folder.
"""

_LISTED = 1000  # runs in a table; a longer one would take minutes


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "study",
        help="a grid of runs in one table",
        description=_DESCRIPTION,
        epilog=f"example of a study:\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="the study, a TOML file; see below")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        help="folder for the runs and tables (default: studies/NAME)",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="stop after N more runs")
    parser.add_argument(
        "--dry-run", action="store_true", help="list the runs and their states, and exit"
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("hstree study: expected a single process, got one started by torchrun")
    study = read_study(arguments.file)
    output = arguments.output or str(Path("studies", study.name))
    if arguments.dry_run:
        list_runs(study_runs(study, Path(output)))
        return 0
    with output_folder(output) as folder:

        def write(runs: Sequence[StudyRun]) -> None:
            command = f"hstree study {Path(arguments.file).name}"
            write_together(folder, study_report(study, runs).content("study", command))

        runs = run_study(
            study, folder, limit=arguments.limit, reporter=ConsoleReporter, changed=write
        )
    report = study_report(study, runs)
    show()
    print_tables(report.tables, report.notes)
    print(fold(f"written to {folder}: study.md, study.tex, study.csv", sys.stdout))
    return 1 if any(run.failure is not None for run in runs) else 0


def list_runs(runs: Sequence[Run]) -> None:
    left = seconds_left(runs)
    columns = [("run", attrgetter("name")), ("state", attrgetter("state"))]
    notes = [f"about {duration(left)} of training left"] if left else []
    if len(runs) > _LISTED:
        states = Counter(run.state for run in runs[_LISTED:])
        rest = ", ".join(f"{count:,} {state}" for state, count in states.items())
        notes.insert(0, f"and {len(runs) - _LISTED:,} more runs: {rest}")
    print_tables([table(f"{len(runs)} runs", runs[:_LISTED], columns)], notes)
