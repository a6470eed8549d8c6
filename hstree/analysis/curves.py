"""Validation curves of several runs in one picture."""

from __future__ import annotations

import math

from hstree._figures import FORMATS, line_style, new_figure, picture, plain

from .compare import Comparison, RunGroup


def validation_curves(comparison: Comparison, file_format: str = "png") -> bytes:
    """A picture of validation perplexity by epoch, a line for each run.

    Runs of a group share a colour and an entry of the legend. A dot marks the best epoch of a run,
    an open diamond the first whose weights were averaged.

    Args:
        comparison: at least one of its runs has an ended epoch.
        file_format: png, pdf or svg.

    Raises:
        ValueError: no epoch has ended in any run, or the format is another one.
    """
    if file_format not in FORMATS:
        raise ValueError(f"file_format: expected one of {', '.join(FORMATS)}, got {file_format!r}")
    groups = [group for group in comparison.groups if any(run.epochs for run in group.runs)]
    if not groups:
        raise ValueError("comparison: expected a run with at least one ended epoch, got none")
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    figure = new_figure(7.2, 4.4 + 0.2 * len(groups))
    axes = figure.add_subplot()
    for number, group in enumerate(groups):
        style = line_style(number)
        colour = style["color"]
        label: str | None = _label(comparison, group)
        for run in group.runs:
            points = {
                e.epoch: e.valid_perplexity if math.isfinite(e.valid_perplexity) else math.nan
                for e in run.epochs
            }
            if not points:
                continue
            axes.plot(list(points), list(points.values()), **style, lw=1.4, label=label)
            label = None
            if run.best is not None:
                best = run.best.epoch
                axes.plot([best], [points[best]], "o", color=colour, ms=4)
            averaged = [e.epoch for e in run.epochs if e.averaged]
            if averaged:
                first = averaged[0]
                axes.plot([first], [points[first]], "D", mfc="white", mec=colour, ms=6)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch (passes over the training text)")
    axes.set_ylabel("validation perplexity per token (log scale)")
    caption = "dot: best epoch"
    if any(e.averaged for run in comparison.runs for e in run.epochs):
        caption += ", diamond: first epoch of averaged weights"
    axes.set_title(caption, fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return picture(figure, file_format)


def _label(comparison: Comparison, group: RunGroup) -> str:
    text = group.description if comparison.repeated else f"{group.runs[0].path}: {group.head}"
    if comparison.repeated:
        runs = "1 run" if len(group.runs) == 1 else f"{len(group.runs)} runs"
        text = f"{group.label}: {text} ({runs})"
    if len(text) > 100:
        text = text[:99] + "\N{HORIZONTAL ELLIPSIS}"
    return plain(text)
