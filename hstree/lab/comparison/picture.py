"""Plot of the validation curves of several runs."""

from __future__ import annotations

import math
from typing import Any

from hstree.lm._pictures import line_style, new_figure, plain

from .compute import Comparison, RunGroup


def validation_curves(comparison: Comparison) -> Any:
    """Plot validation perplexity by epoch, one line for each run.

    Runs of a group share a color and a legend entry. A dot marks the best epoch of a run, an open
    diamond the first epoch with averaged weights.

    Raises:
        ValueError: no run has a completed epoch.
    """
    groups = [group for group in comparison.groups if any(run.epochs for run in group.runs)]
    if not groups:
        raise ValueError("comparison: expected a run with at least one completed epoch, got none")
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = new_figure(7.2, 4.4 + 0.2 * len(groups))
    axes = figure.add_subplot()
    caption = "dot: best epoch"
    for number, group in enumerate(groups):
        style, label = line_style(number), _label(comparison, group)
        for i, run in enumerate(run for run in group.runs if run.epochs):
            curve = {
                e.epoch: e.valid_perplexity if math.isfinite(e.valid_perplexity) else math.nan
                for e in run.epochs
            }
            axes.plot([*curve], [*curve.values()], **style, lw=1.4, label=None if i else label)
            assert run.best is not None
            axes.plot(run.best.epoch, curve[run.best.epoch], "o", color=style["color"], ms=4)
            averaged = next((e.epoch for e in run.epochs if e.averaged), None)
            if averaged is not None:
                axes.plot(averaged, curve[averaged], "D", mfc="white", mec=style["color"], ms=6)
                caption = "dot: best epoch, diamond: first epoch of averaged weights"
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch (passes over the training text)")
    axes.set_ylabel("validation perplexity per token (log scale)")
    axes.set_title(caption, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def _label(comparison: Comparison, group: RunGroup) -> str:
    text = f"{group.runs[0].path}: {group.head}"
    if comparison.repeated:
        runs = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"
        text = f"{group.label}: {group.description} ({runs})"
    return plain(text if len(text) <= 100 else text[:99] + "\N{HORIZONTAL ELLIPSIS}")
