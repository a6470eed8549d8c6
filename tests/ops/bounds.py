"""Error bounds from the number of terms of a sum and the sum of their magnitudes, which hold at any
scale of the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Checked:
    """A true value and the magnitude of the terms that sum up to it."""

    value: Array
    terms: Array

    @classmethod
    def zeros(cls, *shape: int) -> Checked:
        return cls(np.zeros(shape), np.zeros(shape))

    def add(self, where: tuple[int | slice | Array, ...], value: Array | float) -> None:
        self.value[where] += value
        self.terms[where] += np.abs(value)


def close(name: str, got: Array, true: Checked, terms: float, unit: float, rounding: float,
          tiny: float, of_terms: float = 0.0) -> None:  # fmt: skip
    """|got - true| <= what summing in `unit` and rounding once to the output type can explain.
    of_terms: relative error of each term."""
    assert got.shape == true.value.shape, name
    relative = 2 * (terms + 8) * unit + of_terms
    bound = relative * true.terms + rounding * np.abs(true.value) + 2 * tiny
    error = np.abs(got - true.value)
    excess = error - bound
    assert not np.isnan(got).any(), f"{name}: NaN"
    assert (excess <= 0).all(), (
        f"{name}: error {error.max():.3g}, bound exceeded by {excess.max():.3g}"
    )
