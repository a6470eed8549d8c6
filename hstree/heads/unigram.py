"""Class frequencies as probabilities that every class has."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def smoothed_frequencies(frequencies: npt.ArrayLike, n_classes: int) -> npt.NDArray[np.float64]:
    """Frequencies [V] as float64, a zero counted as half the smallest positive one.

    All zero: all ones. Where every class has been seen they are left as they are.

    Raises:
        ValueError: for a wrong shape, or a negative, infinite or NaN entry.
    """
    mass: npt.NDArray[np.float64] = np.asarray(frequencies, dtype=np.float64)
    if mass.shape != (n_classes,):
        raise ValueError(f"frequencies: expected shape ({n_classes},), got {mass.shape}")
    bad: npt.NDArray[Any] = np.flatnonzero(~(np.isfinite(mass) & (mass >= 0)))
    if len(bad):
        raise ValueError(
            f"frequencies: expected finite values of at least 0, "
            f"got {mass[bad[0]]} at index {bad[0]}"
        )
    positive = mass[mass > 0]
    if not len(positive):
        return np.ones(n_classes)
    return np.where(mass > 0, mass, positive.min() / 2)
