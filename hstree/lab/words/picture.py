"""Plot of the word similarity of several models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hstree.lm._pictures import COLOURS, new_figure, plain

from .compute import WordSimilarity

_MARKERS = "osD^vP*"


def word_similarity_picture(found: Sequence[Sequence[WordSimilarity]]) -> Any:
    """Plot a band for each set, with a dot for each model at its rho and a line over its 95%
    confidence interval. ``found``: result of :func:`word_similarity`."""
    from matplotlib.ticker import MultipleLocator

    n_sets, n_models = len(found), len(found[0])
    figure = new_figure(7.2, 1.5 + n_sets * max(0.32, 0.09 * n_models + 0.08) + 0.2 * n_models)
    axes = figure.add_subplot()
    for m, column in enumerate(zip(*found, strict=True)):
        colour = COLOURS[m % len(COLOURS)]
        marker = _MARKERS[(m + m // len(COLOURS)) % len(_MARKERS)]
        places = [s + (m - (n_models - 1) / 2) * 0.7 / n_models for s in range(n_sets)]
        rhos = [each.rho for each in column]
        axes.plot(rhos, places, marker, color=colour, ms=4.5, label=plain(column[0].model))
        for each, place in zip(column, places, strict=True):
            if not math.isnan(each.low):
                axes.plot([each.low, each.high], [place, place], color=colour, lw=1, alpha=0.6)
    for s in range(0, n_sets, 2):
        axes.axhspan(s - 0.5, s + 0.5, color="0.95", lw=0, zorder=0)
    axes.axvline(0, color="0.4", lw=0.8, zorder=1)
    axes.set_yticks(range(n_sets), [_label(row) for row in found])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MultipleLocator(0.2))
    axes.grid(axis="x", alpha=0.3)
    axes.set(
        ylim=(n_sets - 0.5, -0.5),
        xlabel="Spearman's rank correlation with human scores, with 95% interval",
    )
    figure.legend(loc="outside upper center", ncols=min(n_models, 4), frameon=False, fontsize=9)
    return figure


def _label(row: Sequence[WordSimilarity]) -> str:
    least, most = min(each.used for each in row), max(each.used for each in row)
    pairs = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{plain(row[0].set)} ({pairs} pairs)"
