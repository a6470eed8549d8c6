"""``hstree analyze function``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import numpy as np

from hstree.lm._pictures import legend, line_style, panels, plain
from hstree.lm.table import Table, decimals, table

from ..report import Report, row_table
from ..runner import Measurement, load_runs
from .compute import (
    POINTS,
    FunctionView,
    Histogram,
    check_function_head,
    view_function,
    weighted_quantile,
)

_QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


def measure(arguments: argparse.Namespace) -> Report:
    runs = load_runs(arguments)
    for name, run in runs.items():
        try:
            check_function_head(run.model)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    texts = {
        name: run.corpus(arguments.settings.data, arguments.settings.column)
        for name, run in runs.items()
    }
    views = {name: view_function(run.model, texts[name].test) for name, run in runs.items()}
    notes = [
        f"{name}: {len(text.test) - 1:,} contexts of the test text of {text.name}"
        for name, text in texts.items()
    ]
    notes += [
        "a constant added to f changes no probability: f is shifted so that the mean of f(logit) "
        "is that of the logits",
        "a linear f only scales the weights: what f adds to a softmax is its deviation from the "
        "best straight line (least squares over all logits)",
    ]
    if any(view.components > 1 for view in views.values()):
        notes.append("the logits of a mixture are those of all components, equally weighted")
    data = {name: function_data(view) for name, view in views.items()}
    rows = [
        {"run": name, "function": view.function, "logit": x, "value": y}
        for name, view in views.items()
        for x, y in zip(view.x.tolist(), view.value.tolist(), strict=True)
    ]
    pictures = {"of-the-logits": function_picture(views)}
    title = "The function that a head applies to its logits"
    return Report(title, function_tables(views), notes, data, rows, pictures)


def function_tables(views: Mapping[str, FunctionView]) -> list[Table]:
    functions = table(
        "Function f of the logits",
        views.items(),
        [
            ("run", lambda row: row[0]),
            ("head", lambda row: row[1].head),
            ("f", lambda row: function_text(row[1])),
            ("logits", lambda row: row[1].logits.total / 1e6, "{:,.1f}M".format),
            ("outside [-R, R]", lambda row: row[1].outside, _percent),
            ("slope of the best line", lambda row: row[1].line, decimals(3)),
            ("SD from that line", lambda row: row[1].bend, decimals(3)),
        ],
    )
    slopes = []
    for name, view in views.items():
        for over, of in view.slopes.items() if view.function != "softmax" else ():
            shown = (weighted_quantile(*of, share) for share in (0.05, 0.5, 0.95))
            slopes.append((name, over, np.average(of[0], weights=of[1]), *shown))
    tables = [functions]
    if slopes:
        header = ("run", "over", "mean", "5%", "median", "95%")
        tables.append(row_table("Slopes of f", header, slopes, None, None, decimals(3)))
    shares = {"least": 0.0, **{f"{100 * q:g}%": q for q in _QUANTILES}, "greatest": 1.0}
    quantiles = [
        (name, over, *map(logits.quantile, shares.values()))
        for name, view in views.items()
        for over, logits in (("all", view.logits), ("next words", view.next_logits))
    ]
    title = "Quantiles of the logits, before f"
    return [*tables, row_table(title, ("run", "over", *shares), quantiles, None, None, decimals(2))]


def function_data(view: FunctionView) -> dict[str, Any]:
    """The view with all histograms, including those of the slopes, in at most ``BINS`` bins."""
    slopes = {}
    for over, (values, weight) in view.slopes.items():
        counts, edges = np.histogram(values, BINS, weights=weight)
        mean = np.average(values, weights=weight)
        slopes[over] = {"mean": mean, **vars(Histogram(edges, counts.astype(np.int64)))}
    coarse = {key: getattr(view, key).coarse(BINS) for key in ("logits", "next_logits")}
    return {**vars(view), **coarse, "slopes": slopes}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.3g}%"


BINS = 120  # of the logits
_SLOPE_BINS = 60
_TAIL = 1e-3  # share of the slopes beyond the right end of the histogram


def function_picture(views: Mapping[str, FunctionView]) -> Any:
    """Plot f against the identity, its local slope, the logits and the slopes. ``views``: by name
    of the run."""
    figure, ((of_f, of_slope), (of_logits, of_slopes)) = panels(10.0, 8.0, 2, 2)
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
    left, right = zip(*(view.x[[0, -1]] for view in views.values()), strict=True)
    for axes in (of_f, of_slope, of_logits):
        axes.set_xlim(min(left), max(right))
    of_slope.set_ylim(bottom=0)
    of_logits.set_yscale("log")
    of_logits.set_ylim(bottom=1e-4)
    legend(figure)
    return figure


def function_text(view: FunctionView) -> str:
    """The function with its options, such as ``gss(c=-1.5, k=2.5)``."""
    if view.function == "softmax":
        return "identity"
    options = ", ".join(f"{name}={value}" for name, value in view.options.items())
    return f"{view.function}({options})" if options else view.function


COMMAND = Measurement(
    "function",
    "the function that a head applies to its logits",
    """\
The increasing function f of heads that are a softmax of f(logits), such as PLIF, GSS, SigSoftmax,
monotonic networks and mixtures of these, compared with the identity: f over the range of the logits
of the test text, and histograms of its slopes and of the logits. For a plain softmax, whose f is
the identity, only the logits are of interest. Without --data, the text that each run was trained on
is read.
""",
    measure,
    runs="+",
    settings=("data", "column", "device", "threads"),
    output="results/function",
)
