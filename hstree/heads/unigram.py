"""Class frequencies as probabilities that every class has."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hstree._checks import check_frequencies


def smoothed_frequencies(frequencies: npt.ArrayLike, n_classes: int) -> npt.NDArray[np.float64]:
    """Frequencies [V] as float64, a zero counted as half the smallest positive one.

    All zero: all ones. Where every class has been seen they are left as they are.

    Raises:
        TypeError: they are not real numbers.
        ValueError: for a wrong shape, or a negative, infinite or NaN entry.
    """
    mass = check_frequencies(frequencies, n_classes)
    positive = mass[mass > 0]
    if not len(positive):
        return np.ones(n_classes)
    return np.where(mass > 0, mass, positive.min() / 2)
