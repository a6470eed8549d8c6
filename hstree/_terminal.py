"""The width of a terminal, and text folded to it."""

from __future__ import annotations

import os
import shlex
import textwrap
from collections.abc import Sequence
from typing import TextIO


def terminal_width(stream: TextIO) -> int | None:
    """Number of columns: ``COLUMNS`` if it is set, else the width of the terminal that ``stream``
    writes to, None if it writes elsewhere."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # a file, a pipe, or no file at all
        return None


def fold(text: str, stream: TextIO) -> str:
    """A line of text, broken between words where it is wider than the terminal of ``stream``; a
    longer word stays whole."""
    width = terminal_width(stream)
    if width is None:
        return text
    return textwrap.fill(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def command_line(arguments: Sequence[str], stream: TextIO, indent: str = "") -> str:
    """A command to paste into a shell, continued on further lines where it is wider than the
    terminal of ``stream``."""
    width = terminal_width(stream)
    words: list[str] = []
    for argument in map(shlex.quote, arguments):
        if words and words[-1].startswith("--") and not argument.startswith("--"):
            words[-1] += f" {argument}"  # a flag and its value share a line
        else:
            words.append(argument)
    lines = [indent + words[0]]
    for word in words[1:]:
        if width is None or len(f"{lines[-1]} {word} \\") <= width:
            lines[-1] += f" {word}"
        else:
            lines[-1] += " \\"
            lines.append(f"{indent}  {word}")
    return "\n".join(lines)
