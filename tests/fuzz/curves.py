"""Increasing functions of the logits in float64 numpy, with their derivatives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fuzz.truth import log_sigmoid, sigmoid

Array = npt.NDArray[np.float64]


@dataclass
class Bend:
    """f(x) = x + (k - 1) log sigmoid(x - c)."""

    c: float
    k: float

    def value(self, x: Array) -> Array:
        if self.k == 1:
            return x
        return x + (self.k - 1) * log_sigmoid(x - self.c)

    def slope(self, x: Array) -> Array:
        return 1 + (self.k - 1) * sigmoid(self.c - x)


@dataclass
class Pieces:
    """The piecewise polynomial of a table [K, 2] or [K, 4], linear beyond [-R, R]."""

    table: Array
    radius: float

    def powers(self, x: Array) -> tuple[npt.NDArray[np.int64], Array, Array]:
        """The interval of each x, the powers of u that its coefficients multiply, and the
        derivatives of those."""
        n, width = self.table.shape
        t = n * (x + self.radius) / (2 * self.radius)
        j = np.clip(np.floor(np.nan_to_num(t, posinf=n, neginf=-1.0)), 0, n - 1).astype(np.int64)
        u, end = t - j, np.clip(t - j, 0.0, 1.0)
        order = np.arange(width)
        of_end = order * end[..., None] ** np.maximum(order - 1, 0)
        powers = end[..., None] ** order
        outside = (u - end)[..., None]
        beyond = np.where((outside != 0) & (of_end != 0), outside * of_end, 0.0)
        return j, powers + beyond, of_end * n / (2 * self.radius)

    def value(self, x: Array) -> Array:
        j, powers, _ = self.powers(x)
        return (self.table[j] * powers).sum(-1)

    def slope(self, x: Array) -> Array:
        j, _, derivative = self.powers(x)
        return (self.table[j] * derivative).sum(-1)

    def table_gradient(self, x: Array, grad: Array) -> Array:
        j, powers, _ = self.powers(x)
        result = np.zeros(self.table.shape)
        np.add.at(result, j.ravel(), (grad[..., None] * powers).reshape(-1, powers.shape[-1]))
        return result


def increasing_table(intervals: int, width: int, random: np.random.Generator) -> Array:
    """A continuous increasing table with f(-R) = 0."""
    rise = random.uniform(0.1, 2.0, intervals)
    start = np.concatenate([[0.0], rise.cumsum()[:-1]])
    if width == 2:
        return np.stack([start, rise], 1)
    slope = np.minimum(rise.min(), random.uniform(0.1, 2.0, intervals + 1))
    begin, end = slope[:-1], slope[1:]
    return np.stack([start, begin, 3 * rise - 2 * begin - end, begin + end - 2 * rise], 1)
