"""Tables and the picture of the functions that heads apply to their logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hstree._figures import line_style, new_figure, picture, plain

from .function import POINTS, QUANTILES, FloatArray, FunctionView, Histogram
from .table import Table, decimals, table

_BINS = 120  # of the logits
_SLOPE_BINS = 60
_TAIL = 1e-3  # share of the slopes beyond the right end of their histogram
# Of the slopes in the pieces of f, at all logits, at those of the words that came next.
_LINES: tuple[dict[str, Any], ...] = (
    {"ls": "--", "lw": 0.9},
    {"ls": "-", "lw": 1.5},
    {"ls": ":", "lw": 1.2},
)


def function_tables(views: Mapping[str, FunctionView]) -> tuple[Table, ...]:
    """Functions, their slopes, and the quantiles of the logits; ``views`` by name of the run."""
    names, found = list(views), list(views.values())
    functions = table(
        "Function f of the logits",
        [
            ("run", False, names),
            ("head", False, [view.head for view in found]),
            ("f", False, [_function_text(view) for view in found]),
            ("logits", True, [f"{view.logits.total / 1e6:,.1f}M" for view in found]),
            ("outside [-R, R]", True, [_percent(view.outside) for view in found]),
            ("slope of the best line", True, [decimals(view.line, 3) for view in found]),
            ("SD from that line", True, [decimals(view.bend, 3) for view in found]),
        ],
    )
    slopes = [
        (name, over, values, weight)
        for name, view in views.items()
        for over, values, weight in _slopes(view)
        if view.function != "softmax"
    ]
    logits = [
        (name, over, histogram)
        for name, view in views.items()
        for over, histogram in (("all", view.logits), ("next words", view.next_logits))
    ]
    tables = [functions]
    if slopes:
        columns = [("run", False, [row[0] for row in slopes])]
        columns += [("over", False, [row[1] for row in slopes])]
        means = [np.average(values, weights=weight) for _, _, values, weight in slopes]
        columns += [("mean", True, [decimals(float(mean), 3) for mean in means])]
        for share, name in ((0.05, "5%"), (0.5, "median"), (0.95, "95%")):
            cut = [_weighted_quantile(values, weight, share) for _, _, values, weight in slopes]
            columns += [(name, True, [decimals(value, 3) for value in cut])]
        tables.append(table("Slopes of f", columns))
    shares = (0.0, *QUANTILES, 1.0)
    quantiles = [[histogram.quantile(share) for share in shares] for *_, histogram in logits]
    columns = [("run", False, [row[0] for row in logits])]
    columns += [("over", False, [row[1] for row in logits])]
    for k, name in enumerate(("least", *(f"{100 * q:g}%" for q in QUANTILES), "greatest")):
        columns += [(name, True, [decimals(row[k], 2) for row in quantiles])]
    return (*tables, table("Quantiles of the logits, before f", columns))


def function_notes(views: Mapping[str, FunctionView]) -> list[str]:
    """What a reader must know beside the tables."""
    notes = [
        "a constant added to f changes no probability: f is drawn with the mean of f(logit) moved "
        "to that of the logits",
        "a straight f is no more than a factor on the weights; what it adds to a softmax is its "
        "deviation from the best straight line (least squares over all logits)",
    ]
    if any(view.components > 1 for view in views.values()):
        notes.append("the logits of a mixture are those of every component, each counted alike")
    return notes


def function_picture(views: Mapping[str, FunctionView]) -> bytes:
    """A PNG picture: f against the identity, its local slope, the logits, and the slopes."""
    figure = new_figure(10.0, 8.0)
    (of_f, of_slope), (of_logits, of_slopes) = figure.subplots(2, 2)
    reach = np.array([view.x[[0, -1]] for view in views.values()])
    of_f.axline((0, 0), slope=1, color="0.6", lw=0.9)
    of_slope.axhline(1, color="0.6", lw=0.9)
    of_slopes.axvline(1, color="0.6", lw=0.9)
    bent = {name: view for name, view in views.items() if view.function != "softmax"}
    ends = [
        _weighted_quantile(values, weight, 1 - _TAIL)
        for view in bent.values()
        for _, values, weight in _slopes(view)
    ]
    edges = np.linspace(0, 1.05 * max(ends, default=1.5), _SLOPE_BINS + 1)
    for number, (name, view) in enumerate(views.items()):
        style: dict[str, Any] = {**line_style(number), "lw": 1.4}
        label = plain(f"{name}: {_function_text(view)}")
        of_logits.plot(*_density(view.logits.coarse(_BINS)), **style, label=label)
        dotted = style | {"linestyle": ":", "lw": 1.2}
        of_logits.plot(*_density(view.next_logits.coarse(_BINS)), **dotted)
        if name not in bent:
            continue
        of_f.plot(view.x, view.value, **style)
        middle = (view.x[1:] + view.x[:-1]) / 2
        of_slope.plot(middle, np.diff(view.value) / np.diff(view.x), **style)
        for end in (-1, 1):
            if view.radius is not None and view.x[0] < end * view.radius < view.x[-1]:
                for axes in (of_f, of_slope):
                    axes.axvline(end * view.radius, color=style["color"], lw=0.8, ls=":")
        for (_, values, weight), line in zip(_slopes(view), _LINES, strict=True):
            share = np.histogram(values, edges, weights=100 * weight / weight.sum())[0]
            of_slopes.stairs(share, edges, color=style["color"], **line)
    for axes, title, x, y in (
        (
            of_f,
            "f against the identity (grey)",
            "logit",
            "f(logit), equal mean over the logits",
        ),
        (
            of_slope,
            f"mean slope of f over 1/{POINTS - 1} of the range of the logits",
            "logit",
            "slope of f",
        ),
        (
            of_logits,
            "logits before f: all; those of the next words (dotted)",
            "logit",
            "% per unit",
        ),
        (
            of_slopes,
            "slopes: pieces of f (dashed), all logits, next words (dotted)",
            "slope of f",
            f"% per {edges[1]:.3f}",
        ),
    ):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(alpha=0.3)
    for axes in (of_f, of_slope, of_logits):
        axes.set_xlim(reach[:, 0].min(), reach[:, 1].max())
    of_slope.set_ylim(bottom=0)
    of_logits.set_yscale("log")
    of_logits.set_ylim(bottom=1e-4)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return picture(figure)


def function_data(view: FunctionView) -> dict[str, Any]:
    """The view in JSON-able values, histograms in at most ``_BINS`` bins."""
    return {
        "head": view.head,
        "function": view.function,
        "options": view.options,
        "components": view.components,
        "radius": view.radius,
        "outside": view.outside,
        "shift": view.shift,
        "x": view.x.tolist(),
        "value": view.value.tolist(),
        "line": view.line,
        "bend": view.bend,
        "logits": _counts(view.logits.coarse(_BINS)),
        "next_logits": _counts(view.next_logits.coarse(_BINS)),
        "slopes": {over: _slope_data(values, weight) for over, values, weight in _slopes(view)},
    }


def _slopes(view: FunctionView) -> tuple[tuple[str, FloatArray, FloatArray], ...]:
    """Slopes and their weights: each piece of f once, at all logits, at those of the next words."""
    return (
        ("pieces of f", view.pieces, np.ones(len(view.pieces))),
        ("all logits", view.slopes, view.logits.counts.astype(np.float64)),
        ("next words", view.next_slopes, view.next_logits.counts.astype(np.float64)),
    )


def _slope_data(values: FloatArray, weight: FloatArray) -> dict[str, Any]:
    counts, edges = np.histogram(values, _BINS, weights=weight)
    mean = float(np.average(values, weights=weight))
    return {"mean": mean, "edges": edges.tolist(), "counts": counts.astype(int).tolist()}


def _weighted_quantile(values: FloatArray, weight: FloatArray, share: float) -> float:
    """The least value that at least this share of the weight does not exceed."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    place = np.searchsorted(below, share * below[-1])
    return float(values[order[min(int(place), len(values) - 1)]])


def _counts(histogram: Histogram) -> dict[str, list[Any]]:
    return {"edges": histogram.edges.tolist(), "counts": histogram.counts.tolist()}


def _density(histogram: Histogram) -> tuple[FloatArray, FloatArray]:
    """Middles of the bins, and percent of the numbers per unit; nan in empty bins."""
    share = 100 * histogram.counts / histogram.total / np.diff(histogram.edges)
    return histogram.middles, np.where(share > 0, share, np.nan)


def _function_text(view: FunctionView) -> str:
    if view.function == "softmax":
        return "identity"
    options = ", ".join(f"{name}={value}" for name, value in view.options.items())
    return f"{view.function}({options})" if options else view.function


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"
