"""Checks of options that several rooms share."""

from __future__ import annotations

import math
from typing import Any

_NO_NUMBER = (bool, str, bytes, type(None))


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """The value as an int, if it is a whole number of at least ``minimum``; else raises
    ValueError."""
    if isinstance(value, _NO_NUMBER) or not hasattr(value, "__index__") or value < minimum:
        raise ValueError(f"{name}: expected a whole number of at least {minimum}, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, *, positive: bool = False) -> float:
    """The value as a float, if it is a finite number, and positive if need be; else raises
    ValueError."""
    number = _float(value)
    if not math.isfinite(number) or (positive and number <= 0):
        kind = "finite positive number" if positive else "finite number"
        raise ValueError(f"{name}: expected a {kind}, got {value!r}")
    return number


def check_probability(name: str, value: Any) -> float:
    """The value as a float, if it is in [0, 1); else raises ValueError."""
    number = _float(value)
    if not 0 <= number < 1:
        raise ValueError(f"{name}: expected a probability in [0, 1), got {value!r}")
    return number


def _float(value: Any) -> float:
    """NaN for what is not a number."""
    if isinstance(value, _NO_NUMBER) or not hasattr(value, "__float__"):
        return math.nan
    return float(value)
