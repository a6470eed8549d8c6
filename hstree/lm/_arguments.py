"""Arguments of commands, with limits and defaults that the help shows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LONG = 40  # characters of choices beyond which a usage line would not fit 80 columns


class Argument:
    """An argument of a command. ``options`` are those of ``add_argument`` of argparse; what follows
    from the default, a whole number for a :func:`count` or a list for several values, need not be
    among them. The default and a long list of choices are added to the help."""

    def __init__(self, flag: str, help: str, default: Any = None, **options: Any) -> None:
        values = default if isinstance(default, list) else [default]
        if isinstance(default, list) and default:
            options.setdefault("nargs", "+")
        if values and type(values[0]) is int:
            options.setdefault("type", count)
        if "type" in options:
            options.setdefault("metavar", "N" if options["type"] in (int, count) else "X")
        choices = ", ".join(options.get("choices", ()))
        if len(choices) * (2 if "nargs" in options else 1) > _LONG:
            options["metavar"] = "NAME"
            help += f"; one of {choices}"
        if default not in (None, "", []):
            help += f" (default: {' '.join(map(str, values))})"
        self.flag, self.options = flag, {"help": help, "default": default, **options}

    def add(self, parser: Any) -> None:
        parser.add_argument(self.flag, **self.options)


def output_file(flag: str, path: str | Path, *suffixes: str) -> Path:
    """The path of a file to write. Raises ValueError, which begins with the flag, unless its folder
    exists and it ends in one of the suffixes, if there are any."""
    file = Path(path)
    if suffixes and file.suffix.lower() not in suffixes:
        *others, last = suffixes
        ends = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{flag}: expected a name that ends in {ends}, got {file}")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{flag}: there is no folder {file.parent}")
    return file


@contextmanager
def flags_named(flags: Mapping[str, str]) -> Iterator[None]:
    """A context in which errors about these arguments of a function name the flags instead."""
    try:
        yield
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        if name not in flags:
            raise
        raise ValueError(f"{flags[name]}{colon}{rest}") from error


def number(expected: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """A conversion to a finite number that ``fits``; the error says what was expected."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


positive = number("a positive number", lambda value: value > 0)
not_negative = number("a number of at least 0", lambda value: value >= 0)
share = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
temperature = number("a number from 1e-6 to 1e6", lambda value: 1e-6 <= value <= 1e6)


def count(text: str) -> int:
    """A whole number from 1 to 2**31 - 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"expected at most {2**31 - 1}, got {value}")
    return value


NUMBER: dict[str, Any] = {"type": count, "metavar": "N"}
"""Options of an argument that is a whole number above 0."""
