"""A measurement as a command: its flags, and its result as tables, a page, figures and pictures."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import torch

import hstree
from hstree._files import Content, write_together
from hstree._numerics import dtype_name
from hstree.lm.cli import Argument
from hstree.lm.cli import count as whole
from hstree.lm.config import choose_device
from hstree.lm.data import Corpus
from hstree.lm.report import (
    Table,
    fold,
    markdown,
    number,
    optional_package,
    picture,
    print_tables,
)
from hstree.lm.run import Run, load_run, run_names
from hstree.ops._kernels import cpu_capability

Form = str | Callable[[Any], str]
SPLIT = Argument("--split", "part of the text", "test", choices=("test", "valid"))
TEXT = (Argument("--data", "text, as for hstree train (default: that of the run)", metavar="PATH"),)
DEVICE = (
    Argument("--device", "auto: a GPU if there is one", "auto", choices=("auto", "cpu", "cuda")),
    Argument("--threads", "number of CPU threads (default: chosen by torch)", type=whole),
)


@dataclass(frozen=True)
class Report:
    """The result of a measurement."""

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()  # what a reader must know in addition, one sentence each
    data: Any = None  # for JSON, beside the records of tables; nan and infinity become null
    pictures: Mapping[str, Any] = field(default_factory=dict)  # by name; "": the only one
    files: Mapping[str, Content] = field(default_factory=dict)  # others, by name
    appendix: str = ""  # Markdown below the command
    introduction: str = ""  # Markdown below the title
    made: str = ""  # machine, versions and date, a line; "": those of now

    def content(self, name: str, command: str) -> dict[str, Content]:
        """The files of this report by name: NAME.md, the page, which shows the command lines that
        made the report; NAME.json, in full precision; NAME-PICTURE.png."""
        files: dict[str, Content] = {
            f"{name}-{which}.png" if which else f"{name}.png": picture(figure)
            for which, figure in self.pictures.items()
        }
        shown = [f"![{Path(file).stem.replace('-', ' ')}]({file})" for file in files]
        files |= self.files
        data = {of.title: of.records for of in self.tables if isinstance(of, RecordTable)}
        data = {**data, **(self.data or {})} if data else self.data
        if data is not None:
            files[f"{name}.json"] = (json.dumps(plain_data(data), indent=1) + "\n").encode()
        page = markdown(self.tables, self.notes).strip()
        where = self.made or made_on([provenance()])
        made = ["Made by", indent(command, "    "), self.appendix, where]
        parts = [f"# {self.title}", self.introduction.strip(), page, *shown, *made]
        files[f"{name}.md"] = ("\n\n".join(filter(None, parts)) + "\n").encode()
        return files


def row_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *forms: Callable[[Any], str] | None,
) -> Table:
    """A table of rows of values. ``forms``: for each column the function that formats its numbers,
    which are aligned right, or None for text. The last one is that of all further columns."""
    of = [*forms, *forms[-1:] * (len(header) - len(forms))]
    cells = (
        tuple(form(v) if form else str(v) for form, v in zip(of, row, strict=True)) for row in rows
    )
    return Table(title, tuple(header), tuple(cells), tuple(form is not None for form in of))


@dataclass(frozen=True)
class RecordTable(Table):
    """A table and the records that it shows."""

    records: Sequence[Mapping[str, Any]] = ()


def record_table(
    title: str, records: Sequence[Mapping[str, Any]], forms: Mapping[str, Form] | None = None
) -> RecordTable:
    """A table of records with equal keys, whose keys, as words, are the header. Columns with texts
    are text; numbers are written with the form of their key, a format or a function, by default
    four digits, or 1,234 for whole ones; None and nan as ``-``."""

    def form(key: str) -> Callable[[Any], str] | None:
        found = (forms or {}).get(key)
        if callable(found):
            return found
        values = [record[key] for record in records]
        if any(isinstance(value, str) for value in values):
            return None
        whole = all(value is None or isinstance(value, int) for value in values)
        return number(found or ("," if whole else ",.4g"))

    header = [key.replace("_", " ").replace("press", "Press") for key in records[0]]
    cells = [[*record.values()] for record in records]
    shown = row_table(title, header, cells, *map(form, records[0]))
    return RecordTable(**vars(shown), records=records)


def interval(form: str) -> Callable[[tuple[float, float]], str]:
    """A formatter of intervals by a format specification of their ends; ``-`` for nan."""
    return lambda of: "-" if math.isnan(of[0]) else f"{of[0]:{form}} to {of[1]:{form}}"


def plain_data(value: Any) -> Any:
    """The value as lists, dictionaries, texts and numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    elif hasattr(value, "_asdict"):  # a named tuple
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return dtype_name(value) if isinstance(value, torch.dtype) else value


# Where a figure comes from


def provenance() -> dict[str, Any]:
    """Machine, instruction set of the CPU kernels, threads, versions and date of a measurement."""
    machine = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                machine = line.partition(":")[2].strip()
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    versions = {"hstree": hstree.__version__, "torch": torch.__version__}
    return {
        "machine": machine,
        "instructions": cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": versions | {"python": platform.python_version()},
        "date": str(date.today()),
    }


def made_on(records: Iterable[Mapping[str, Any]]) -> str:
    """Machines, instruction sets, threads, versions and dates of records with the keys of
    :func:`provenance`, as one line of text. Records without ``threads`` had one; older ones do
    not name the instruction set."""
    records = list(records)
    parts = {
        "{}": {record["machine"] for record in records},
        "CPU kernels for {}": {r["instructions"] for r in records if "instructions" in r},
        "{} threads": {str(record.get("threads", 1)) for record in records},
        "torch {}": {record["versions"]["torch"] for record in records},
        "Python {}": {record["versions"]["python"] for record in records},
    }
    text = [form.format(value) for form, found in parts.items() for value in sorted(found)]
    dates = sorted({record["date"] for record in records})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return ", ".join([*text, days]).replace("1 threads", "one thread") + "."


# Commands


@dataclass(frozen=True)
class Measurement:
    """A measurement as a command. The docstring of the module of ``measure`` describes it.
    ``measure`` raises ValueError for arguments that are not valid."""

    name: str  # of the command, and stem of the files that it writes
    help: str
    measure: Callable[[argparse.Namespace], Report]
    arguments: tuple[Argument, ...] = ()
    runs: str | int | None = None  # nargs of positional run folders, ``directories``
    output: str = ""  # default of --output; "": the name

    def add_command(self, commands: Any) -> None:
        about = sys.modules[self.measure.__module__].__doc__
        parser = commands.add_parser(
            self.name, help=self.help, description=about, formatter_class=Paragraphs
        )
        if self.runs is not None:
            about = "run folders of hstree train"
            parser.add_argument("directories", metavar="RUN", nargs=self.runs, help=about)
        text = "folder for the page, pictures and figures; files of the same name are replaced"
        folder = Argument("--output", text, self.output or self.name, metavar="FOLDER")
        for argument in (*self.arguments, folder):
            argument.add(parser)
        parser.set_defaults(handler=self._run)

    def _run(self, arguments: argparse.Namespace) -> int:
        if "device" in arguments:
            arguments.device = choose_device(arguments.device)
            if getattr(arguments, "threads", None) is not None:
                torch.set_num_threads(arguments.threads)
        optional_package("matplotlib", self.name, "lm")  # before the work, not after it
        with output_folder(arguments.output) as folder:
            report = self.measure(arguments)
            print_tables(report.tables, report.notes)
            files = report.content(self.name, shlex.join(["hstree", *sys.argv[1:]]))
            write_together(folder, files)
        print(fold(f"written to {folder}: {', '.join(files)}", sys.stdout))
        return 0


class Paragraphs(argparse.HelpFormatter):
    """Help whose description is a docstring: paragraphs are folded, indented formulas keep their
    lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.strip().replace("``", "").split("\n\n")
        fill = super()._fill_text
        raw = [p[0] == " " and max(map(len, p.splitlines())) <= 80 for p in parts]
        folded = [p if r else fill(p, width, indent) for p, r in zip(parts, raw, strict=True)]
        return "\n\n".join(folded)


@contextmanager
def output_folder(output: str) -> Iterator[Path]:
    """The folder of ``--output``, created before the work, so that no result is lost, and removed
    again if the work fails and leaves it empty. Raises ValueError if it cannot be written to."""
    folder = Path(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=folder)).rmdir()
    except OSError as error:
        expected = f"expected a folder to write to, which may be new, got {folder}"
        raise ValueError(f"--output: {expected}: {error.strerror}") from None
    try:
        yield folder
    except BaseException:
        for path in made:
            with suppress(OSError):  # not empty
                path.rmdir()
        raise


def load_runs(arguments: argparse.Namespace) -> dict[str, Run]:
    """The runs of a command by name, on its device."""
    paths, device = arguments.directories, getattr(arguments, "device", "cpu")
    return {n: load_run(p, device) for n, p in zip(run_names(paths), paths, strict=True)}


def corpus_of(run: Run, arguments: argparse.Namespace) -> Corpus:
    return run.corpus(arguments.data)


def read_columns(
    path: str, texts: Mapping[str, str], numbers: Mapping[str, str]
) -> tuple[list[dict[str, Any]], int]:
    """Read columns of a CSV file in UTF-8 whose first line names them: the cells of each line by
    flag, and the number of lines skipped because one of these cells is empty. ``texts`` and
    ``numbers``, which are converted to float, hold the name of a column for each flag. Raises
    ValueError if a column is missing or a cell is not a number."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            names = reader.fieldnames or []
            lines = [(reader.line_num, cells) for cells in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected a CSV file in UTF-8: {error}") from None
    for flag, column in (*texts.items(), *numbers.items()):
        if column not in names:
            expected = f"expected one of the columns of {path} ({', '.join(names)})"
            raise ValueError(f"{flag}: {expected}, got {column}")
    found = []
    for line, cells in lines:
        chosen: dict[str, Any] = {f: cells[c].strip() for f, c in {**texts, **numbers}.items()}
        if all(chosen.values()):
            try:
                found.append(chosen | {flag: float(chosen[flag]) for flag in numbers})
            except ValueError as error:
                raise ValueError(f"{path}, line {line}: expected numbers: {error}") from None
    return found, len(lines) - len(found)


def skipped(lines: int, path: str, reason: str) -> list[str]:
    """A note on lines of a file that do not count; none if there are none."""
    amount = "1 line" if lines == 1 else f"{lines} lines"
    return [f"{amount} of {path} skipped: {reason}"] if lines else []
