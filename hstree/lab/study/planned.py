"""A planned study as a script: its plan is written in Python, and may choose settings by sweeps."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hstree._files import write_together
from hstree.lm._arguments import count
from hstree.lm.data import Corpus, load_corpus
from hstree.lm.training import ConsoleReporter, Reporter

from ..report import Report
from .command import list_runs
from .engine import StudyInterrupted, make_runs
from .plan import Contender, PlannedRun, planned_runs
from .records import Records


@dataclass(frozen=True)
class PlannedStudy:
    """A study that a script plans. Its files are NAME.json, NAME.md and the pictures.

    Attributes:
        contenders: in the order of importance.
        measure: makes a run on a text, given the command line too, and returns its figures; among
            them ``valid``, the validation perplexity, None if training diverged.
        report: tables and pictures of the records.
        commands: the command lines that make it.
        load: reads the text of ``--data``.
        time_steps: times training steps for the page, given the text and the records; None: there
            is no ``--times``.
        devices: devices that ``measure`` can run on, the default first; it reads ``--device``.
    """

    name: str
    contenders: Sequence[Contender]
    measure: Callable[[PlannedRun, Corpus, argparse.Namespace], dict[str, Any]]
    report: Callable[[Sequence[Contender], Records], Report]
    commands: Sequence[str]
    load: Callable[[Path], Corpus] = load_corpus
    time_steps: Callable[[Corpus, Records], None] | None = None
    devices: Sequence[str] = ("cpu",)

    def files(self, records: Records) -> dict[str, Any]:
        report = self.report(self.contenders, records)
        return report.content(records.path.stem, "\n".join(self.commands))

    def main(
        self, description: str | None, folder: Path, arguments: Sequence[str] | None = None
    ) -> None:
        """The script, with its records in ``folder`` by default."""
        parser = self._parser(description, folder)
        given = parser.parse_args(arguments)
        records = Records(given.save.with_suffix(".json"))
        if given.merge:
            records.merge(given.merge)
        known = partial(planned_runs, self.contenders, records, given.only)
        if given.dry_run:
            list_runs(known())
            return

        def write(runs: Sequence[PlannedRun] = ()) -> None:
            write_together(records.path.parent, self.files(records))

        if given.times or not (given.merge or given.page):
            if given.data is None:
                parser.error("expected --data")
            corpus = self.load(given.data)
            if given.times and self.time_steps is not None:
                self.time_steps(corpus, records)
            else:
                text = text_name(corpus)
                records.check_text(text)

                def finish(
                    runs: Sequence[PlannedRun], number: int, reporter: Reporter
                ) -> list[PlannedRun]:
                    run = runs[number]
                    figures = self.measure(run, corpus, given)
                    records.add(run.model.name, run.settings, run.seed, text, figures)
                    return known()

                listen, limit = ConsoleReporter, given.limit
                try:
                    make_runs(known, finish, limit=limit, reporter=listen, changed=write)
                except StudyInterrupted as interruption:
                    sys.exit(str(interruption))
        write()

    def _parser(self, description: str | None, folder: Path) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawTextHelpFormatter
        )
        names = [contender.name for contender in self.contenders]
        add = parser.add_argument
        shown = "contenders to run (default: all that are missing)\n" + ", ".join(names)
        times = "time training steps in turns, and exit" if self.time_steps else argparse.SUPPRESS
        add("--data", type=Path, metavar="FOLDER", help="folder of the text")
        add("--only", nargs="+", metavar="NAME", choices=names, default=[], help=shown)
        add("--limit", type=count, metavar="N", help="stop after N more runs")
        if len(self.devices) > 1:
            text = "device of the runs (default: %(default)s)"
            add("--device", choices=self.devices, default=self.devices[0], help=text)
        for name, metavar, default, text in (
            ("runs", "FOLDER", Path("studies", self.name), "folder for run folders"),
            (
                "save",
                "NAME",
                folder / self.name,
                "NAME.json keeps the records; NAME.md is the page",
            ),
        ):
            text += " (default: %(default)s)"
            add(f"--{name}", type=Path, metavar=metavar, default=default, help=text)
        add("--merge", nargs="+", type=Path, metavar="FILE", help="add records of other machines")
        add("--dry-run", action="store_true", help="list the runs and their states, and exit")
        add("--page", action="store_true", help="make the page from the records, and exit")
        add("--times", action="store_true", help=times)
        return parser


def text_name(corpus: Corpus) -> str:
    """Identifies a text in records: the number of training tokens and classes, and the perplexity
    of the unigram distribution on the test part."""
    unigram = math.exp(corpus.statistics().unigram_loss(corpus.test[1:]))
    return (
        f"{len(corpus.train):,} training tokens, {len(corpus.vocabulary):,} classes, "
        f"unigram test perplexity {unigram:.4g}"
    )
