"""Class frequencies, all positive."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hstree._checks import check_frequencies


def smoothed_frequencies(frequencies: npt.ArrayLike, n_classes: int) -> npt.NDArray[np.float64]:
    """Frequencies [V] as float64; zeros are replaced by half of the smallest positive frequency.

    If all frequencies are zero, all become one.

    Raises:
        TypeError: if they are not real numbers.
        ValueError: for a wrong shape, or a negative, infinite or NaN entry.
    """
    mass = check_frequencies(frequencies, n_classes)
    positive = mass[mass > 0]
    if not len(positive):
        return np.ones(n_classes)
    return np.where(mass > 0, mass, positive.min() / 2)
