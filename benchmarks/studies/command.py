"""The command line of a study: it makes the missing runs one after another, and its page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hstree._files import write_atomic

from . import times
from .plan import Contender, Run, named, next_run, state
from .records import Records

RESULTS = Path(__file__).resolve().parents[1] / "results"


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: of its files in benchmarks/results: NAME.json, NAME.md and the pictures.
        contenders: in the order of importance.
        page: the page in Markdown, from the contenders and the records.
        pictures: the pictures of the page by name of the file, as PNG.
        timed: names of the contenders whose training steps are timed in turns; the others are
            compared with the first one.
    """

    name: str
    contenders: Sequence[Contender]
    page: Callable[[Sequence[Contender], Records], str]
    pictures: Callable[[Sequence[Contender], Records], Mapping[str, bytes]]
    timed: Sequence[str] = ()

    def write(self, records: Records) -> None:
        """Write the page and its pictures beside the records."""
        write_atomic(records.path.with_suffix(".md"), self.page(self.contenders, records).encode())
        for name, picture in self.pictures(self.contenders, records).items():
            write_atomic(records.path.with_name(name), picture)


def parser(description: str | None, study: Study) -> argparse.ArgumentParser:
    """A parser with the arguments of all studies."""
    arguments = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    names = [contender.name for contender in study.contenders]
    arguments.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=names,
        default=[],
        help="contenders to run (default: all that are missing)\n" + ", ".join(names),
    )
    arguments.add_argument(
        "--minutes", type=float, metavar="N", help="start no further run after N minutes"
    )
    arguments.add_argument(
        "--save",
        type=Path,
        metavar="NAME",
        default=RESULTS / study.name,
        help="NAME.json keeps the records; NAME.md is the page (default: %(default)s)",
    )
    arguments.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="add records of other machines, end"
    )
    arguments.add_argument(
        "--list", action="store_true", help="print how far each contender is, and end"
    )
    arguments.add_argument(
        "--page", action="store_true", help="make the page from the records, and end"
    )
    if study.timed:
        arguments.add_argument(
            "--times", action="store_true", help="time training steps in turns, and end"
        )
    return arguments


def work(
    study: Study,
    arguments: argparse.Namespace,
    prepare: Callable[[], tuple[str, Callable[[Run], dict[str, Any]]]],
    time_steps: Callable[[Sequence[Contender]], Mapping[str, Any]] | None = None,
) -> None:
    """Do what the command line asks for.

    Args:
        study: the study.
        arguments: of :func:`parser`.
        prepare: reads the text; returns its name, and a function that makes a run and returns its
            figures.
        time_steps: reads the text and returns the result of ``times.measure`` for some contenders.
    """
    records = Records(arguments.save.with_suffix(".json"))
    if arguments.merge:
        records.merge(arguments.merge)
    if arguments.list:
        print("\n".join(progress(study, records)))
        return
    if time_steps is not None and arguments.times:
        timed = [named(study.contenders, name) for name in study.timed]
        times.save(time_steps(timed), records.path)
    elif not (arguments.merge or arguments.page):
        text, measure = prepare()
        records.check_text(text)
        begin = time.monotonic()
        while run := next_run(study.contenders, records, arguments.only):
            if arguments.minutes is not None and time.monotonic() - begin > 60 * arguments.minutes:
                break
            try:
                figures = measure(run)
            except KeyboardInterrupt:
                sys.exit(f"{run.name}: interrupted; the same command goes on")
            records.add(run.contender.name, run.settings, run.seed, text, figures)
            study.write(records)
    study.write(records)


def progress(study: Study, records: Records) -> list[str]:
    """One line for each contender: the finished runs, and what comes next."""
    lines = []
    for contender in study.contenders:
        found = state(contender, study.contenders, records)
        tried = sum(map(len, found.tried.values()))
        if found.settings is None:
            waits = contender.like is not None
            line = (
                f"waits for {contender.like}" if waits else f"{tried} values tried, sweep goes on"
            )
        else:
            chosen = named(study.contenders, contender.like or contender.name).sweeps
            values = "".join(f", {key} {found.settings[key]:g}" for key in chosen)
            line = f"{contender.seeds - len(found.missing)} of {contender.seeds} seeds{values}"
        lines.append(f"{contender.name:<24} {line}")
    return lines
