"""What reaches a terminal: text without control characters, folded to its width."""

from __future__ import annotations

import os
import re
import shlex
import sys
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


_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with escapes such as ``\\x1b`` for what a terminal would obey: control characters,
    except line feeds and tabs, line separators, and overrides of the direction of writing. Words
    and names come from files of others."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: str = "", *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print a :func:`visible` text, by default to standard output."""
    print(visible(text), end=end, file=file or sys.stdout, flush=True)


def fold(text: str, stream: TextIO) -> str:
    """A line of :func:`visible` text, broken between words where it is wider than the terminal of
    ``stream``; a longer word stays whole."""
    text, width = visible(text), terminal_width(stream)
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
    for argument in map(shlex.quote, map(visible, arguments)):
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
