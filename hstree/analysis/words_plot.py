"""Word similarity of several models in one picture."""

from __future__ import annotations

import math

from hstree._figures import COLOURS, new_figure, picture, plain

from .words import WordSimilarity

_MARKERS = "osD^vP*"


def word_similarity_plot(result: WordSimilarity) -> bytes:
    """A PNG: for each set, in a band of its own, a dot for each model at its rho and a line over
    its 95% confidence interval."""
    from matplotlib.ticker import MultipleLocator

    n_sets, n_models = len(result.sets), len(result.models)
    figure = new_figure(7.2, 1.5 + n_sets * max(0.32, 0.09 * n_models + 0.08) + 0.2 * n_models)
    axes = figure.add_subplot()
    for m, model in enumerate(result.models):
        colour = COLOURS[m % len(COLOURS)]
        offset = (m - (n_models - 1) / 2) * 0.7 / n_models
        places = [s + offset for s in range(n_sets)]
        column = [row[m] for row in result.correlations]
        axes.plot(
            [c.rho for c in column],
            places,
            _MARKERS[(m + m // len(COLOURS)) % len(_MARKERS)],
            color=colour,
            ms=4.5,
            label=plain(model),
        )
        for c, place in zip(column, places, strict=True):
            if not math.isnan(c.low):
                axes.plot([c.low, c.high], [place, place], color=colour, lw=1, alpha=0.6)
    for s in range(0, n_sets, 2):
        axes.axhspan(s - 0.5, s + 0.5, color="0.95", lw=0, zorder=0)
    axes.axvline(0, color="0.4", lw=0.8, zorder=1)
    axes.set_yticks(range(n_sets), [_label(result, s) for s in range(n_sets)])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(n_sets - 0.5, -0.5)
    axes.xaxis.set_major_locator(MultipleLocator(0.2))
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("Spearman's rank correlation with human scores, with 95% interval")
    figure.legend(loc="outside upper center", ncols=min(n_models, 4), frameon=False, fontsize=9)
    return picture(figure)


def _label(result: WordSimilarity, s: int) -> str:
    used = sorted({c.used for c in result.correlations[s]})
    pairs = f"{used[0]:,}" if len(used) == 1 else f"{used[0]:,} to {used[-1]:,}"
    return f"{plain(result.sets[s])} ({pairs} pairs)"
