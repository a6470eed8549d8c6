"""Checks of the options of heads."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

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


def check_order(order: Tensor | None, n_classes: int) -> Tensor:
    """An order of the classes, int64 [V], by default 0, 1, 2, ...; raises ValueError for what is no
    permutation."""
    if order is None:
        return torch.arange(n_classes)
    right = order.shape == (n_classes,) and order.dtype == torch.int64
    if not right or not torch.equal(order.sort().values, torch.arange(n_classes)):
        raise ValueError(
            f"order: expected a permutation of 0..{n_classes - 1}, int64 [{n_classes}]"
        )
    return order


def _float(value: Any) -> float:
    """NaN for what is not a number."""
    if isinstance(value, _NO_NUMBER) or not hasattr(value, "__float__"):
        return math.nan
    return float(value)
