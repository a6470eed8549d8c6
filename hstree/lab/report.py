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
from functools import cache
from operator import itemgetter
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np
import torch

import hstree
from hstree._files import Content, write_together
from hstree._numerics import dtype_name
from hstree.lm.cli import Argument, add_run_argument
from hstree.lm.config import (
    TrainConfig,
    add_config_arguments,
    choose_device,
    config_values,
    set_threads,
)
from hstree.lm.report import (
    Column,
    Table,
    csv_text,
    fold,
    markdown,
    number,
    optional_package,
    picture,
    print_tables,
    table,
)
from hstree.lm.run import Run, load_run, run_names

Form = str | Callable[[Any], str]
MARKERS = "osD^vP*X"  # of the curves of a picture
SPLIT = Argument("--split", "part of the text", "test", choices=("test", "valid"))


@dataclass(frozen=True)
class Report:
    """The result of a measurement: a title, tables, and ``notes``, what a reader must know in
    addition, one sentence each.

    Attributes:
        data: all results in full precision. Dataclasses, arrays and tensors are converted for JSON;
            nan and infinity become null.
        rows: the same as rows for CSV, mappings or dataclasses with equal keys; None: no CSV file.
        pictures: figures by name, in display order; "" names the only one.
        files: other files by name.
        appendix, introduction: Markdown below the command and below the title.
        made: machine, versions and date of the measurement, a line; "": those of now.
    """

    title: str
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    data: Any = None
    rows: Sequence[Any] | None = None
    pictures: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Content] = field(default_factory=dict)
    appendix: str = ""
    introduction: str = ""
    made: str = ""

    def content(self, name: str, command: str) -> dict[str, Content]:
        """The files of this report by name: NAME.md, the page, which shows the command lines that
        made the report; NAME.json; NAME.csv; NAME-PICTURE.png."""
        files: dict[str, Content] = {
            f"{name}-{which}.png" if which else f"{name}.png": picture(figure)
            for which, figure in self.pictures.items()
        }
        shown = [f"![{Path(file).stem.replace('-', ' ')}]({file})" for file in files]
        files |= self.files
        if self.data is not None:
            files[f"{name}.json"] = (json.dumps(plain_data(self.data), indent=1) + "\n").encode()
        if self.rows is not None:
            files[f"{name}.csv"] = csv_text([*map(_record, self.rows)]).encode()
        page = markdown(self.tables, self.notes).strip()
        made = ["Made by", indent(command, "    "), self.appendix, self.made or machine()]
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
    columns: list[Column] = [
        (name, itemgetter(place), form) if form else (name, itemgetter(place))
        for place, (name, form) in enumerate(zip(header, of, strict=True))
    ]
    return table(title, rows, columns)


def record_table(
    title: str, records: Sequence[Mapping[str, Any]], forms: Mapping[str, Form] | Form = ",.4g"
) -> Table:
    """A table of records with equal keys, whose keys, as words, are the header. Columns with texts
    are text; numbers are written with the form of their key, a format or a function, whole ones by
    default as 1,234, and None and nan as ``-``."""

    def form(key: str) -> Callable[[Any], str] | None:
        found = forms.get(key, ",.4g") if isinstance(forms, Mapping) else forms
        if not isinstance(found, str):
            return found
        values = [record[key] for record in records]
        if any(isinstance(value, str) for value in values):
            return None
        whole = all(value is None or isinstance(value, int) for value in values)
        return number("," if whole and found == ",.4g" else found)

    header = [key.replace("_", " ").replace("press", "Press") for key in records[0]]
    return row_table(title, header, [[*r.values()] for r in records], *map(form, records[0]))


def _record(value: Any) -> Any:
    """The fields of a dataclass or named tuple by name; other values as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    return value._asdict() if hasattr(value, "_asdict") else value


def plain_data(value: Any) -> Any:
    """The value as lists, dictionaries, texts and numbers."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    value = _record(value)
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return dtype_name(value) if isinstance(value, torch.dtype) else value


# Where a figure comes from


def provenance() -> dict[str, Any]:
    """Machine, threads, versions and date of a measurement."""
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    versions = {"hstree": hstree.__version__, "torch": torch.__version__}
    return {
        "machine": ", ".join([processor(), *gpu]),
        "threads": torch.get_num_threads(),
        "versions": versions | {"python": platform.python_version()},
        "date": str(date.today()),
    }


def made_on(records: Iterable[Mapping[str, Any]]) -> str:
    """Machines, threads, versions and dates of records with the keys of :func:`provenance`, as one
    line of text. Records without ``threads`` had one."""
    records = list(records)
    parts = {
        "{}": {record["machine"] for record in records},
        "{} threads": {str(record.get("threads", 1)) for record in records},
        "torch {}": {record["versions"]["torch"] for record in records},
        "Python {}": {record["versions"]["python"] for record in records},
    }
    text = [form.format(value) for form, found in parts.items() for value in sorted(found)]
    dates = sorted({record["date"] for record in records})
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return ", ".join([*text, days]).replace("1 threads", "one thread") + "."


def machine() -> str:
    """Machine, threads, versions and date of now in one line."""
    return made_on([provenance()])


@cache
def processor() -> str:
    """The name of the processor, if the system provides it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Commands


@dataclass(frozen=True)
class Measurement:
    """A measurement as a command. The docstring of the module of ``measure`` describes it.

    Attributes:
        name: name of the command, and stem of the files that it writes.
        measure: a function of the parsed arguments that returns the report. It raises ValueError
            for arguments that are not valid. With ``settings`` the arguments have ``settings``, a
            :class:`hstree.lm.config.TrainConfig`, and ``device``, a :class:`torch.device`.
        runs: number of positional run folders (``nargs`` of argparse), which become
            ``directories``; None: the command takes none.
        settings: settings of ``hstree train`` that the command takes.
        output: default of ``--output``; "": the name.
    """

    name: str
    help: str
    measure: Callable[[argparse.Namespace], Report]
    arguments: tuple[Argument, ...] = ()
    runs: str | None = None
    settings: tuple[str, ...] = ()
    output: str = ""

    def add_command(self, commands: Any) -> None:
        parser = commands.add_parser(
            self.name,
            help=self.help,
            description=sys.modules[self.measure.__module__].__doc__,
            formatter_class=Paragraphs,
        )
        if self.runs is not None:
            add_run_argument(parser, self.runs)
        text = "folder for the page, pictures and figures, created if it does not exist; files of "
        text += "the same name are replaced"
        folder = Argument("--output", text, self.output or self.name, metavar="FOLDER")
        for argument in (*self.arguments, folder):
            argument.add(parser)
        add_config_arguments(parser, only=self.settings)
        parser.set_defaults(handler=self._run)

    def _run(self, arguments: argparse.Namespace) -> int:
        if self.settings:
            arguments.settings = TrainConfig(**config_values(arguments))
            arguments.device = choose_device(arguments.settings.device)
            set_threads(arguments.settings)
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


def load_runs(arguments: argparse.Namespace, paths: Sequence[str] = ()) -> dict[str, Run]:
    """Load the runs of a command, or others, by name, on its device."""
    paths = paths or arguments.directories
    named = zip(run_names(paths), paths, strict=True)
    return {name: load_run(path, arguments.device) for name, path in named}


def read_columns(
    path: str, texts: Mapping[str, str], numbers: Mapping[str, str]
) -> tuple[list[dict[str, Any]], int]:
    """Read columns of a CSV file in UTF-8 whose first line names them: the cells of each line by
    flag, and the number of lines skipped because one of these cells is empty. ``texts`` and
    ``numbers``, which are converted to float, hold the name of a column for each flag. Raises
    ValueError if it is not such a table, a column is missing, or a cell is not a number."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            lines = [(reader.line_num, cells) for cells in reader if cells]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected a CSV file in UTF-8: {error}") from None
    if not lines:
        expected = "expected a line with the names of the columns"
        raise ValueError(f"{path}: {expected}, got an empty file")
    names = lines.pop(0)[1]
    columns = {**texts, **numbers}
    for flag, column in columns.items():
        if names.count(column) != 1:
            expected = f"expected one of the columns of {path} ({', '.join(names)})"
            raise ValueError(f"{flag}: {expected}, got {column}")
    found = []
    for line, cells in lines:
        where = f"{path}, line {line}"
        if len(cells) != len(names):
            expected = f"expected {len(names)} cells as in the first line"
            raise ValueError(f"{where}: {expected}, got {len(cells)}")
        chosen: dict[str, Any] = {f: cells[names.index(c)].strip() for f, c in columns.items()}
        if not all(chosen.values()):
            continue
        for flag, column in numbers.items():
            try:
                chosen[flag] = float(chosen[flag])
            except ValueError:
                expected = f"expected a number in column {column}"
                raise ValueError(f"{where}: {expected}, got {chosen[flag]!r}") from None
        found.append(chosen)
    return found, len(lines) - len(found)


def skipped(lines: int, path: str, reason: str) -> list[str]:
    """A note on lines of a file that do not count; none if there are none."""
    amount = "1 line" if lines == 1 else f"{lines} lines"
    return [f"{amount} of {path} skipped: {reason}"] if lines else []
