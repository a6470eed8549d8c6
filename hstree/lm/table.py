"""Tables of text, and their output as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of text cells. ``right``: for each column, whether it is aligned right, as numbers
    are."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[bool, ...]


Column = tuple[str, Callable[[Any], Any]] | tuple[str, Callable[[Any], Any], Callable[[Any], str]]


def table(title: str, items: Iterable[Any], columns: Sequence[Column]) -> Table:
    """A table with a row for each item. ``columns``: for each its name, a function from an item to
    its value and, for numbers, which are aligned right, a function that formats it, such as
    :func:`count` or ``decimals(2)``."""
    rows = [
        [(column[2] if len(column) == 3 else str)(column[1](item)) for column in columns]
        for item in items
    ]
    header = tuple(column[0] for column in columns)
    right = tuple(len(column) == 3 for column in columns)
    return Table(title, header, tuple(map(tuple, rows)), right)


# Cells


def text(value: Any) -> str:
    """A setting as short text; ``-`` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return str(value)


def number(form: str) -> Callable[[float | None], str]:
    """A formatter of numbers by a format specification; ``-`` for None and nan."""
    return lambda value: "-" if value is None or math.isnan(value) else format(value, form)


def decimals(digits: int) -> Callable[[float | None], str]:
    """A formatter of numbers with this many decimals, such as 1,234.50; ``-`` for None and nan."""
    return number(f",.{digits}f")


def count(value: int | None) -> str:
    """1,234 or, from 100,000 on, 1.23M; ``-`` for None."""
    if value is None:
        return "-"
    return f"{value:,}" if value < 100_000 else f"{value / 1e6:.2f}M"


def probability(value: float) -> str:
    """0.012, or 3.4e-05 below 0.001; ``-`` for nan."""
    return "-" if math.isnan(value) else f"{value:.3f}" if value >= 0.001 else f"{value:.1e}"


# Output formats


def markdown(tables: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """The tables with their titles, then the notes as a list."""
    parts = []
    for content in tables:
        lines = [
            f"**{_markdown_text(content.title)}**",
            "",
            _markdown_row(content.header),
            _markdown_row(["---:" if right else "---" for right in content.right]),
            *map(_markdown_row, content.rows),
        ]
        parts.append("\n".join(lines))
    listed = [f"- {_markdown_text(note)}" for note in notes]
    if listed:
        parts.append("\n".join(listed))
    return "\n\n".join(parts) + "\n"


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_markdown_text(cell).replace("|", "\\|") for cell in cells) + " |"


def _markdown_text(line: str) -> str:
    """Escape words such as <unk>, which are not HTML."""
    return line.replace("<", "\\<")


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
} | {character: f"\\{character}" for character in "&%$#_{}"}


def latex(tables: Iterable[Table]) -> str:
    """The tables as ``table`` environments with the rules of booktabs."""
    parts = []
    for content in tables:
        lines = [
            r"\begin{table}",
            rf"  \caption{{{_latex_text(content.title)}}}",
            rf"  \begin{{tabular}}{{{''.join('r' if right else 'l' for right in content.right)}}}",
            r"    \toprule",
            f"    {_latex_row(content.header)}",
            r"    \midrule",
            *(f"    {_latex_row(row)}" for row in content.rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in cell)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as CSV with a header. None is an empty cell; numbers keep all digits.
    Empty if there are no rows."""
    if not rows:
        return ""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return buffer.getvalue()
