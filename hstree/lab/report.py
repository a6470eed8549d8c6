"""The result of a measurement, as data and as files."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
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
from hstree._files import Content
from hstree._numerics import dtype_name
from hstree.lm._pictures import picture
from hstree.lm.table import Column, Table, csv_text, markdown, table


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
            rows = [
                row if isinstance(row, Mapping) else dataclasses.asdict(row) for row in self.rows
            ]
            files[f"{name}.csv"] = csv_text(rows).encode()
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


def matrix_table(
    title: str,
    models: Sequence[str],
    matrix: Iterable[Iterable[float]],
    form: Callable[[float], str],
) -> Table:
    """A table with a row and a column for each model. ``form``: formats the numbers [n, n]."""
    rows = [(model, *row) for model, row in zip(models, matrix, strict=True)]
    return row_table(title, ("model", *models), rows, None, form)


def plain_data(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return value


def provenance() -> dict[str, Any]:
    """Machine, threads, versions and date of a measurement."""
    device = processor()
    if torch.cuda.is_available():
        device += f", {torch.cuda.get_device_name()}"
    return {
        "machine": device,
        "threads": torch.get_num_threads(),
        "versions": {
            "hstree": hstree.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
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
