"""``hstree analyze function``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from hstree.lm.table import Table, decimals, table

from ..report import Report
from ..runner import Measurement, load_runs
from .compute import FunctionView, Histogram, check_function_head, view_function, weighted_quantile
from .picture import BINS, function_picture, function_text

_QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure the functions of the heads of runs."""
    runs = load_runs(arguments)
    for name, run in runs.items():
        try:
            check_function_head(run.model)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    texts = {name: run.corpus(arguments.settings.data) for name, run in runs.items()}
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
    return Report(
        "The function that a head applies to its logits",
        function_tables(views),
        notes,
        {name: function_data(view) for name, view in views.items()},
        [
            {"run": name, "function": view.function, "logit": x, "value": y}
            for name, view in views.items()
            for x, y in zip(view.x.tolist(), view.value.tolist(), strict=True)
        ],
        {"of-the-logits": function_picture(views)},
    )


def function_tables(views: Mapping[str, FunctionView]) -> list[Table]:
    """Tables of the functions, their slopes, and the quantiles of the logits. ``views``: by name of
    the run."""
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
    slopes = [
        (
            name,
            over,
            np.average(values, weights=weight),
            *(weighted_quantile(values, weight, share) for share in (0.05, 0.5, 0.95)),
        )
        for name, view in views.items()
        for over, (values, weight) in view.slopes.items()
        if view.function != "softmax"
    ]
    tables = [functions]
    if slopes:
        tables.append(_number_table("Slopes of f", ("mean", "5%", "median", "95%"), slopes, 3))
    shares = {"least": 0.0, **{f"{100 * q:g}%": q for q in _QUANTILES}, "greatest": 1.0}
    quantiles = [
        (name, over, *map(logits.quantile, shares.values()))
        for name, view in views.items()
        for over, logits in (("all", view.logits), ("next words", view.next_logits))
    ]
    return [*tables, _number_table("Quantiles of the logits, before f", shares, quantiles, 2)]


def _number_table(
    title: str, header: Iterable[str], rows: Sequence[tuple[Any, ...]], digits: int
) -> Table:
    """A table of numbers with this many decimals, after columns with the run and the domain."""
    numbers = [(name, itemgetter(i), decimals(digits)) for i, name in enumerate(header, start=2)]
    return table(title, rows, [("run", itemgetter(0)), ("over", itemgetter(1)), *numbers])


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
    settings=("data", "device", "threads"),
    output="results/function",
)
