"""Numbers with limits, for argparse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


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
share_below_one = number("a number of at least 0 and below 1", lambda value: 0 <= value < 1)


temperature = number("a number from 1e-6 to 1e6", lambda value: 1e-6 <= value <= 1e6)
theta = number("a number from 0 to 1e6", lambda value: 0 <= value <= 1e6)


def count(text: str) -> int:
    """A whole number from 1 to 2**31 - 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    if value >= 2**31:
        raise argparse.ArgumentTypeError(f"expected at most {2**31 - 1}, got {value}")
    return value
