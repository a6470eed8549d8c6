"""Plots of the synthetic bottleneck experiment."""

from __future__ import annotations

import math
from typing import Any

from hstree.lm._pictures import line_style, new_figure, plain

from .compute import SyntheticResult

_MARKERS = "osD^vP*X"
_STYLE: dict[str, Any] = {"ms": 4.5, "lw": 1.4, "elinewidth": 0.8, "capsize": 2}


def synthetic_picture(result: SyntheticResult, alpha: float) -> Any:
    """Plot mode matching and divergence against the dimension for one alpha, with a line for each
    head and bars of one standard deviation over seeds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    setting = result.setting
    baseline = next(each for each in result.baselines if each.alpha == alpha)
    figure = new_figure(9.6, 4.2 + 0.22 * math.ceil(len(setting.heads) / 4))
    left, right = figure.subplots(1, 2)
    for number, choice in enumerate(setting.heads):
        cells = [c for c in result.cells if (c.alpha, c.head) == (alpha, choice.label)]
        cells.sort(key=lambda cell: cell.dimension)
        finite = [cell for cell in cells if 0 < cell.divergence < math.inf]
        style = _STYLE | line_style(number) | {"marker": _MARKERS[number % len(_MARKERS)]}
        # the first are drawn on top
        style |= {"label": plain(choice.label), "zorder": 3 - number / 100}
        left.errorbar(
            [cell.dimension for cell in cells],
            [cell.mode_matching for cell in cells],
            [cell.mode_matching_deviation for cell in cells],
            **style,
        )
        right.errorbar(
            [cell.dimension for cell in finite],
            [cell.divergence for cell in finite],
            [min(cell.divergence_deviation, 0.9 * cell.divergence) for cell in finite],
            **style,
        )
    dotted = {"color": "0.5", "linestyle": (0, (1, 2)), "lw": 1.0}
    left.axhline(baseline.mode_matching, **dotted)
    right.axhline(baseline.divergence, **dotted, label="one prediction for all contexts")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(setting.dimensions, list(map(str, setting.dimensions)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("dimension D of a context vector (log scale)")
        axes.grid(alpha=0.3)
    left.set(ylabel="contexts whose mode is matched (%)", ylim=(0, 102))
    right.set(ylabel="KL(P* || P) (nats, log scale)", yscale="log")
    low, high = right.get_ylim()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8)
    right.yaxis.set_major_locator(LogLocator(subs=subs))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    seeds = f"{setting.seeds} {'seeds' if setting.seeds > 1 else 'seed'}"
    sizes = f"{setting.contexts} contexts, {setting.outcomes} outcomes"
    figure.suptitle(f"{sizes}, targets ~ Dirichlet({alpha:g}), {seeds}", fontsize=10)
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
