"""Columns of CSV files, for commands that read tables."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_columns(
    path: str, texts: Mapping[str, str], numbers: Mapping[str, str]
) -> tuple[dict[str, list[Any]], int]:
    """Columns of a CSV file whose first line names them.

    Args:
        path: the file, UTF-8.
        texts, numbers: for each flag the column that it names.

    Returns:
        The cells of each column by its flag, of ``numbers`` as float, and how many lines were left
        out because one of these cells is empty.

    Raises:
        ValueError: the file is not such a table, has no column of this name, or a cell is not a
            number.
    """
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
    header = lines[0][1]
    places = {}
    for flag, column in {**texts, **numbers}.items():
        if header.count(column) != 1:
            listed = ", ".join(header)
            raise ValueError(
                f"{flag}: expected one of the columns of {path} ({listed}), got {column}"
            )
        places[flag] = header.index(column)
    columns: dict[str, list[Any]] = {flag: [] for flag in places}
    left_out = 0
    for line, cells in lines[1:]:
        if len(cells) != len(header):
            raise ValueError(
                f"{path}, line {line}: expected {len(header)} cells as in the first line, "
                f"got {len(cells)}"
            )
        chosen = {flag: cells[place].strip() for flag, place in places.items()}
        if not all(chosen.values()):
            left_out += 1
            continue
        for flag, cell in chosen.items():
            columns[flag].append(
                _number(cell, path, line, numbers[flag]) if flag in numbers else cell
            )
    return columns, left_out


def _number(cell: str, path: str, line: int, column: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise ValueError(
            f"{path}, line {line}: expected a number in column {column}, got {cell!r}"
        ) from None
