"""``hstree study``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import count
from .results import machine, results_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hstree.experiments.study import StudyRun
    from hstree.experiments.study_file import Study

_DESCRIPTION = """\
Train a grid of models, heads by seeds by settings, that one small TOML file describes, and put them
into one table: study.md and study.tex with a row for each model (perplexities as mean and standard
deviation over the seeds, p-value against a baseline, parameters, seconds of an epoch, ranks of the
log-probabilities), study.csv with a row for each run. The tables are written anew after every run.
Stopped in whatever way, the same command goes on; runs that have finished are not made again, nor
is one whose training failed, until its folder is removed.
"""
_FILE = """\
the study:

    seeds = [1, 2, 3]
    baseline = "softmax"          # t-tests against this model
    rank = true                   # or {rows = 4000, split = "test"}

    [settings]                    # any setting of hstree train, for all models
    data = "ptb"
    epochs = 3

    [[models]]
    head = "softmax"              # or a preset: preset = "ptb-softmax"

    [[models]]
    name = "shape"
    head = "gss"
    learning_rate = 0.004         # any setting, in place of the one for all
    head_options = { c = [-1.5, 0.0], k = [1.5, 2.5] }

A list is a grid: this study has softmax and four models of gss, with three seeds each.
"""


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "study",
        help="a grid of runs in one table",
        description=_DESCRIPTION,
        epilog=_FILE,
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
    import os

    from hstree.experiments.study import run_study, study_runs
    from hstree.experiments.study_file import read_study
    from hstree.experiments.study_table import study_notes, study_table
    from hstree.training import default_reporter

    from .printing import print_tables

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("hstree study: expected a single process, not one of torchrun")
    study = read_study(arguments.file)
    if arguments.output is None:
        arguments.output = str(Path("studies", study.name))
    if arguments.dry_run:
        _list(study_runs(study, Path(arguments.output)))
        return 0
    folder = results_folder(arguments)
    runs = run_study(
        study,
        folder,
        limit=arguments.limit,
        reporter=default_reporter,
        changed=lambda runs: _write(study, arguments.file, folder, runs),
    )
    print()
    print_tables([study_table(study, runs)], study_notes(study, runs))
    print(f"written to {folder}: study.md, study.tex, study.csv")
    return 1 if any(run.state == "failed" for run in runs) else 0


def _list(runs: Sequence[StudyRun]) -> None:
    from hstree.analysis import table
    from hstree.experiments.study import seconds_left

    from .printing import print_tables

    columns = [
        ("run", False, [run.path.name for run in runs]),
        ("state", False, [run.state for run in runs]),
    ]
    left = seconds_left(runs)
    notes = [f"about {left / 60:.0f} min of training are left"] if left else []
    print_tables([table(f"{len(runs)} runs", columns)], notes)


def _write(study: Study, file: str, folder: Path, runs: Sequence[StudyRun]) -> None:
    from hstree._files import write_atomic
    from hstree.analysis import csv_text, latex, markdown
    from hstree.experiments.study_table import study_notes, study_rows, study_table

    content = study_table(study, runs)
    page = [
        f"# {study.name}",
        markdown([content], study_notes(study, runs)).strip(),
        f"Made by `hstree study {Path(file).name}` with",
        f"```toml\n{study.source.strip()}\n```",
        machine(),
    ]
    write_atomic(folder / "study.md", ("\n\n".join(page) + "\n").encode())
    write_atomic(folder / "study.tex", latex([content]).encode())
    write_atomic(folder / "study.csv", csv_text(study_rows(study, runs)).encode())
