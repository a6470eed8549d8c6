"""Columns of CSV files."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
        raise ValueError(
            f"{path}: expected a line with the names of the columns, got an empty file"
        )
    names = lines.pop(0)[1]
    columns = {**texts, **numbers}
    for flag, column in columns.items():
        if names.count(column) != 1:
            raise ValueError(
                f"{flag}: expected one of the columns of {path} ({', '.join(names)}), got {column}"
            )
    found = []
    for line, cells in lines:
        where = f"{path}, line {line}"
        if len(cells) != len(names):
            raise ValueError(
                f"{where}: expected {len(names)} cells as in the first line, got {len(cells)}"
            )
        chosen: dict[str, Any] = {f: cells[names.index(c)].strip() for f, c in columns.items()}
        if not all(chosen.values()):
            continue
        for flag, column in numbers.items():
            try:
                chosen[flag] = float(chosen[flag])
            except ValueError:
                raise ValueError(
                    f"{where}: expected a number in column {column}, got {chosen[flag]!r}"
                ) from None
        found.append(chosen)
    return found, len(lines) - len(found)


def skipped(lines: int, path: str, reason: str) -> list[str]:
    """A note on lines of a file that do not count; none if there are none."""
    amount = "1 line" if lines == 1 else f"{lines} lines"
    return [f"{amount} of {path} skipped: {reason}"] if lines else []
