"""Checks of arguments that the files of this folder share."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree._host import MAX_CLASSES


def check_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    """Returns ``value`` as an int of [low, high]; raises TypeError or ValueError."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {value!r}") from None
    if number < low or (high is not None and number > high):
        wanted = f"at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number


def check_n_classes(n_classes: Any) -> int:
    """Returns the number of classes as an int from 1 to MAX_CLASSES."""
    return check_int("n_classes", n_classes, 1, MAX_CLASSES)


def check_seed(seed: Any) -> int:
    """Returns ``seed`` as an int that fits an unsigned 64-bit number."""
    return check_int("seed", seed, 0, 2**64 - 1)


def integer_array(name: str, values: Any, dtype: type[np.integer[Any]]) -> npt.NDArray[Any]:
    """Returns ``values`` as a new contiguous 1-D array of ``dtype``; names what does not fit."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected a 1-D array, got shape {array.shape}")
    if array.size == 0:
        return np.empty(0, dtype)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    limits = np.iinfo(dtype)
    if not np.can_cast(array.dtype, dtype):
        bad = (array < limits.min) | (array > limits.max)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(
                f"{name}[{i}]: expected a value that fits {limits.dtype}, got {array[i]}"
            )
    return np.array(array, dtype=dtype, order="C")


def check_frequencies(frequencies: Any, n_classes: int | None = None) -> npt.NDArray[np.float64]:
    """Returns frequencies as a contiguous float64 [V] array: finite, none negative, finite sum."""
    array = np.asarray(frequencies)
    if array.dtype.kind not in "iuf":
        raise TypeError(f"frequencies: expected real numbers, got dtype {array.dtype}")
    if array.ndim != 1 or (n_classes is not None and len(array) != n_classes) or len(array) == 0:
        wanted = "at least one class" if n_classes is None else f"shape ({n_classes},)"
        raise ValueError(f"frequencies: expected a 1-D array of {wanted}, got shape {array.shape}")
    array = np.ascontiguousarray(array, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()
        if not np.isfinite(total) or array.min() < 0:
            bad = ~(np.isfinite(array) & (array >= 0))
            if bad.any():
                i = int(bad.argmax())
                raise ValueError(
                    f"frequencies[{i}]: expected a finite number of at least 0, got {array[i]}"
                )
            raise ValueError(f"frequencies: expected a finite sum, got {total}")
    return array
