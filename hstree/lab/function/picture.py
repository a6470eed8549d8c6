"""Plots of the functions that heads apply to their logits, and of the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hstree.lm._pictures import line_style, new_figure, plain

from .compute import POINTS, FunctionView, weighted_quantile

BINS = 120  # of the logits
_SLOPE_BINS = 60
_TAIL = 1e-3  # share of the slopes beyond the right end of the histogram


def function_picture(views: Mapping[str, FunctionView]) -> Any:
    """Plot f against the identity, its local slope, the logits and the slopes. ``views``: by name
    of the run."""
    figure = new_figure(10.0, 8.0)
    (of_f, of_slope), (of_logits, of_slopes) = figure.subplots(2, 2)
    of_f.axline((0, 0), slope=1, color="0.6", lw=0.9)
    of_slope.axhline(1, color="0.6", lw=0.9)
    of_slopes.axvline(1, color="0.6", lw=0.9)
    ends = [
        weighted_quantile(*slopes, 1 - _TAIL)
        for view in views.values()
        for slopes in view.slopes.values()
        if view.function != "softmax"
    ]
    edges = np.linspace(0, 1.05 * max(ends, default=1.5), _SLOPE_BINS + 1)
    for number, (name, view) in enumerate(views.items()):
        style: dict[str, Any] = {**line_style(number), "lw": 1.4}
        colour, dotted = style["color"], style | {"linestyle": ":", "lw": 1.2}
        label = plain(f"{name}: {function_text(view)}")
        for logits, line in ((view.logits, style | {"label": label}), (view.next_logits, dotted)):
            histogram = logits.coarse(BINS)
            share = 100 * histogram.counts / histogram.total / np.diff(histogram.edges)
            of_logits.plot(histogram.middles, np.where(share > 0, share, np.nan), **line)
        if view.function == "softmax":
            continue
        of_f.plot(view.x, view.value, **style)
        middle = (view.x[1:] + view.x[:-1]) / 2
        of_slope.plot(middle, np.diff(view.value) / np.diff(view.x), **style)
        for end in () if view.radius is None else (-view.radius, view.radius):
            if view.x[0] < end < view.x[-1]:
                for axes in (of_f, of_slope):
                    axes.axvline(end, color=colour, lw=0.8, ls=":")
        lines = (("--", 0.9), ("-", 1.5), (":", 1.2))
        for (values, weight), (dashes, thick) in zip(view.slopes.values(), lines, strict=True):
            share = np.histogram(values, edges, weights=100 * weight / weight.sum())[0]
            of_slopes.stairs(share, edges, color=colour, ls=dashes, lw=thick)
    mean_slope = f"mean slope of f over 1/{POINTS - 1} of the range of the logits"
    next_words = "logits before f: all; those of the next words (dotted)"
    pieces = "slopes: pieces of f (dashed), all logits, next words (dotted)"
    for axes, title, x, y in (
        (of_f, "f against the identity (grey)", "logit", "f(logit), equal mean over the logits"),
        (of_slope, mean_slope, "logit", "slope of f"),
        (of_logits, next_words, "logit", "% per unit"),
        (of_slopes, pieces, "slope of f", f"% per {edges[1]:.3f}"),
    ):
        axes.set_title(title, fontsize=9)
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    left, right = zip(*(view.x[[0, -1]] for view in views.values()), strict=True)
    for axes in (of_f, of_slope, of_logits):
        axes.set_xlim(min(left), max(right))
    of_slope.set_ylim(bottom=0)
    of_logits.set_yscale("log")
    of_logits.set_ylim(bottom=1e-4)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def function_text(view: FunctionView) -> str:
    """The function with its options, such as ``gss(c=-1.5, k=2.5)``."""
    if view.function == "softmax":
        return "identity"
    options = ", ".join(f"{name}={value}" for name, value in view.options.items())
    return f"{view.function}({options})" if options else view.function
