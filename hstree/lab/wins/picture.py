"""Plot of hits and pairwise wins."""

from __future__ import annotations

from typing import Any

import numpy as np

from hstree.lm._pictures import new_figure

from ..heat_map import NUMBERED, heat_map
from .compute import PairwiseWins


def wins_picture(found: PairwiseWins) -> Any:
    """Plot both matrices, in percent of the tokens; wins are colored by their distance from 50%.
    The picture grows with the number of models, and with the length of their names."""
    n = len(found.models)
    hits, wins = (100 * counts / found.tokens for counts in (found.hits, found.wins))
    cells = max(3.0, 0.6 * min(n, NUMBERED))
    names = 0.08 * max(map(len, found.models)) if n <= NUMBERED else 0.0
    figure = new_figure(2 * (cells + names + 1.2), cells + names + 1.0)
    first, second = figure.subplots(1, 2)
    texts = [[f"{value:.1f}" for value in row] for row in hits]
    heat_map(first, hits, found.models, texts, cmap="cividis")
    first.set_title("predicted by the row, not by the column\n(diagonal: by the model)", fontsize=9)
    texts = [["-" if i == j else f"{wins[i, j]:.1f}" for j in range(n)] for i in range(n)]
    far = max(1.0, np.abs(wins - 50)[~np.eye(n, dtype=bool)].max())
    heat_map(second, wins, found.models, texts, cmap="PuOr", vmin=50 - far, vmax=50 + far)
    second.set_title("more probable to the row\nthan to the column", fontsize=9)
    figure.supxlabel(f"% of {found.tokens:,} tokens", fontsize=9)
    return figure
