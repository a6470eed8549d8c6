"""What the pictures of several measurements share: markers and square matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm._pictures import plain

MARKERS = "osD^vP*X"
NUMBERED = 12  # up to this many rows, cells and axes are labelled


def heat_map(
    axes: Any,
    matrix: npt.NDArray[np.float64],
    names: Sequence[str],
    texts: Sequence[Sequence[str]],
    **style: Any,
) -> None:
    """Draw a matrix [n, n] with a color for each number off the diagonal (none for nan), labels of
    rows and columns, and a text in each cell. ``style``: further arguments of ``imshow``."""
    n = len(names)
    image = axes.imshow(np.where(np.eye(n, dtype=bool), np.nan, matrix), **style)
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    if n > NUMBERED:
        return
    for (i, j), value in np.ndenumerate(matrix):
        *color, opacity = image.cmap(image.norm(np.nan if i == j else value))
        dark = opacity > 0 and np.dot(color, (0.299, 0.587, 0.114)) < 0.5
        color_of_text = "white" if dark else "black"
        axes.text(j, i, texts[i][j], ha="center", va="center", color=color_of_text, fontsize=8)
    labels = [plain(name) for name in names]
    long = {"rotation": 40, "ha": "right"} if max(map(len, labels)) > 8 else {}
    axes.set_xticks(range(n), labels, **long)
    axes.set_yticks(range(n), labels)
