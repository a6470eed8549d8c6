"""The increasing function f of heads that are a softmax of f(logits), P(y | h) = softmax(f(l))_y.

f of PLIF, GSS, SigSoftmax, monotonic networks and mixtures of these (Ganea et al., Breaking the
Softmax Bottleneck via Learnable Monotonic Pointwise Non-linearities, 2019) is compared with the
identity: over the range of the logits of the test text, with histograms of its slopes and of the
logits. A constant added to f changes no probability, so f is shifted to the mean of the logits; a
linear f only scales the weights, so what f can add is its deviation from the best straight line.
For a plain softmax only the logits are of interest. Without --data, the text that each run was
trained on is read.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import at_least_float32
from hstree.heads import ForestSoftmax, Mixtape, Softmax
from hstree.heads.functions import PLIF
from hstree.lm.model import LanguageModel, read_contexts
from hstree.lm.report import Table, legend, line_style, panels, plain
from hstree.ops import LogitFunction, default_chunk_rows

from .report import (
    DEVICE,
    TEXT,
    Form,
    Measurement,
    Report,
    corpus_of,
    load_runs,
    record_table,
)

FloatArray = npt.NDArray[np.float64]

POINTS = 257  # number of points of f
BINS = 120  # of the logits, in the figures and the picture
_WIDTH = 2.0**-10  # width of the histogram bins of the logits; for a PLIF, bins end at its knots
_REACH = 1 << 21  # bins on each side


class Histogram:
    """Counts of numbers in bins origin + [i w, (i + 1) w) of width w, -_REACH <= i < _REACH."""

    def __init__(self, origin: float, width: float) -> None:
        self.origin, self.width, self.first = origin, width, 0
        self.counts = np.zeros(0, np.int64)  # [B], of the bins from ``first`` on

    def add(self, values: Tensor) -> None:
        """Count numbers; overwrites them. Raises ValueError if one is not finite or beyond."""
        place = values.sub_(self.origin).mul_(1 / self.width).floor_()
        low, high = (float(v) for v in torch.aminmax(place))
        if not (low >= -_REACH and high < _REACH):  # or nan
            reach = f"{_REACH * self.width:,.0f}"
            raise ValueError(f"model: expected finite logits, from -{reach} to {reach}")
        found = torch.bincount(place.sub_(low).int().flatten()).cpu().numpy()
        parts = [(int(low), found)] + [(self.first, self.counts)] * (len(self.counts) > 0)
        self.first = min(first for first, _ in parts)
        ends = [first + len(counts) for first, counts in parts]
        self.counts = np.zeros(max(ends) - self.first, np.int64)
        for first, counts in parts:
            self.counts[first - self.first :][: len(counts)] += counts

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def edges(self) -> FloatArray:  # [B + 1]
        return self.origin + self.width * (self.first + np.arange(len(self.counts) + 1.0))

    @property
    def middles(self) -> FloatArray:
        return (self.edges[1:] + self.edges[:-1]) / 2

    def quantile(self, share: float) -> float:
        """The quantile of this share, with linear interpolation within a bin."""
        below, edges = np.concatenate([[0], np.cumsum(self.counts)]), self.edges
        wanted = share * below[-1]
        k = int(np.argmax((below[1:] >= wanted) & (self.counts > 0)))
        within = (wanted - below[k]) / self.counts[k]
        return float(edges[k] + within * (edges[k + 1] - edges[k]))

    def coarse(self) -> dict[str, npt.NDArray[Any]]:
        """Edges and counts, with neighboring bins merged into at most ``BINS``."""
        group = -(-len(self.counts) // BINS)
        counts = np.add.reduceat(self.counts, np.arange(0, len(self.counts), group))
        edges = self.edges
        width = group * (edges[1] - edges[0])
        return {"edges": edges[0] + width * np.arange(len(counts) + 1), "counts": counts}


@dataclass(frozen=True)
class FunctionView:
    """The function f of a head over the logits of a text: here, logits are the arguments of f, of
    every context, component and class."""

    head: str
    function: str  # name of f; "softmax" is the identity
    options: dict[str, Any]
    components: int  # logits of a class in each context: 1 except for mixtures of softmaxes
    radius: float | None  # R, if f is a table over [-R, R] and linear outside
    outside: float | None  # share of all logits outside [-R, R]
    shift: float  # makes the mean of f(logit) + shift that of the logits
    x: FloatArray  # evenly spaced points over the range of the logits
    value: FloatArray  # f(x) + shift
    line: float  # slope of the least-squares line of f(logit) over all logits
    bend: float  # standard deviation of f(logit) from that line; 0 for a linear f
    logits: Histogram  # all of them; a piecewise linear f is linear within each of its narrow bins
    next_logits: Histogram  # those of the next words of the text
    slopes: dict[str, dict[str, float]]
    """Mean and quantiles of f' over the pieces of f (or at ``x`` for others), all logits and the
    next words."""

    def __str__(self) -> str:
        """The function with its options, such as ``gss(c=-1.5, k=2.5)``."""
        if self.function == "softmax":
            return "identity"
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.function}({options})" if options else self.function


def check_function_head(model: LanguageModel) -> Softmax:
    head = model.head
    if not isinstance(head, Softmax) or isinstance(head, (Mixtape, ForestSoftmax)):
        raise ValueError(
            "model: expected a head that is a softmax, or a mixture of softmaxes, of f(W h + b), "
            f"got the head {head.name!r}, which applies no function to its logits"
        )
    return head


def view_function(model: LanguageModel, tokens: Any) -> FunctionView:
    """The function that a head applies to its logits, and the distribution of the logits of a text
    [n], n >= 2, read as one stream. Logits are counted in narrow bins, and moments of f(logit) are
    computed at the middles of the bins, so memory does not grow with the text. Raises ValueError
    for a head without such a function, fewer than 2 tokens, or logits that are not finite."""
    head = check_function_head(model)
    with torch.no_grad():
        function: LogitFunction = head.function(torch.float64)
    plif = head.function if isinstance(head.function, PLIF) else None
    origin, width = 0.0, _WIDTH
    if plif is not None:
        interval = 2 * plif.radius / plif.intervals
        origin, width = -plif.radius, interval / math.ceil(interval / _WIDTH)
    logits, next_logits = Histogram(origin, width), Histogram(origin, width)
    for block, target in _logits(model, head, tokens):
        next_logits.add(block.gather(1, target[:, None]))
        logits.add(block)
    middles, counts = logits.middles, logits.counts
    _, next_slopes = value_and_slope(function, next_logits.middles)
    value, slopes = value_and_slope(function, middles)
    dx, dy = (v - np.average(v, weights=counts) for v in (middles, value))
    variance = np.average(dx**2, weights=counts)
    line = np.average(dx * dy, weights=counts) / variance if variance > 0 else math.nan
    shift = float(np.average(middles - value, weights=counts))
    x = np.linspace(logits.edges[0], logits.edges[-1], POINTS)
    value, pieces = value_and_slope(function, x)
    if plif is not None:
        pieces = plif.slopes().detach().double().cpu().numpy()
    radius = None if function.table is None else function.radius
    return FunctionView(
        head=head.name,
        function=head.function.name,
        options=head.function.config(),
        components=logits.total // (head.n_classes * (len(tokens) - 1)),
        radius=radius,
        outside=None if radius is None else np.average(np.abs(middles) > radius, weights=counts),
        shift=shift,
        x=x,
        value=value + shift,
        line=float(line),
        bend=math.sqrt(np.average((dy - line * dx) ** 2, weights=counts)),
        logits=logits,
        next_logits=next_logits,
        slopes={
            "pieces of f": _summary(pieces, np.ones(len(pieces))),
            "all logits": _summary(slopes, counts),
            "next words": _summary(next_slopes, next_logits.counts),
        },
    )


def value_and_slope(function: LogitFunction, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    device = None if function.table is None else function.table.device
    at = torch.tensor(x, dtype=torch.float64, device=device, requires_grad=True)
    with torch.enable_grad():
        value = function(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach().cpu().numpy(), slope.cpu().numpy()


def _summary(values: FloatArray, weight: npt.NDArray[Any]) -> dict[str, float]:
    """The mean, and the smallest values up to which this share of the weight lies."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    found = {"mean": float(np.average(values, weights=weight))}
    for name, share in (("5%", 0.05), ("median", 0.5), ("95%", 0.95)):
        place = np.searchsorted(below, share * below[-1])
        found[name] = float(values[order[min(int(place), len(values) - 1)]])
    return found


@torch.no_grad()
def _logits(model: LanguageModel, head: Softmax, tokens: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, V] of one component in a few contexts, and the words that follow."""
    for hidden, target in read_contexts(model, tokens):
        latent, _ = head.components(head.encode(hidden))
        size = default_chunk_rows(hidden, head.n_classes)
        for rows, wanted in zip(torch.split(latent, size), torch.split(target, size), strict=True):
            for component in rows.unbind(1):
                yield at_least_float32(F.linear(component, head.weight, head.bias)), wanted


_QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


def measure(arguments: argparse.Namespace) -> Report:
    runs = load_runs(arguments)
    for name, run in runs.items():
        try:
            check_function_head(run.model)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    texts = {name: corpus_of(run, arguments) for name, run in runs.items()}
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
    data = {
        name: vars(of) | {"logits": of.logits.coarse(), "next_logits": of.next_logits.coarse()}
        for name, of in views.items()
    }
    pictures = {"of-the-logits": function_picture(views)}
    title = "The function that a head applies to its logits"
    return Report(title, function_tables(views), notes, data, pictures)


def function_tables(views: Mapping[str, FunctionView]) -> list[Table]:
    functions = [
        {"run": name, "head": view.head, "f": str(view)}
        | {"logits": f"{view.logits.total / 1e6:,.1f}M"}
        | {"outside [-R, R]": "-" if view.outside is None else f"{100 * view.outside:.3g}%"}
        | {"slope of the best line": view.line, "SD from that line": view.bend}
        for name, view in views.items()
    ]
    slopes = [
        {"run": name, "over": over} | summary
        for name, view in views.items()
        for over, summary in view.slopes.items()
        if view.function != "softmax"
    ]
    forms: dict[str, Form] = {"slope of the best line": ",.3f", "SD from that line": ",.3f"}
    forms |= {"logits": str, "outside [-R, R]": str}
    tables = [record_table("Function f of the logits", functions, forms)]
    if slopes:
        tables.append(record_table("Slopes of f", slopes, dict.fromkeys(slopes[0], ",.3f")))
    shares = {"least": 0.0, **{f"{100 * q:g}%": q for q in _QUANTILES}, "greatest": 1.0}
    quantiles = [
        {"run": name, "over": over} | {key: of.quantile(q) for key, q in shares.items()}
        for name, view in views.items()
        for over, of in (("all", view.logits), ("next words", view.next_logits))
    ]
    digits = dict.fromkeys(shares, ",.2f")
    return [*tables, record_table("Quantiles of the logits, before f", quantiles, digits)]


def function_picture(views: Mapping[str, FunctionView]) -> Any:
    """Plot f against the identity, and the logits. ``views``: by name of the run."""
    figure, (of_f, of_logits) = panels(10.0, 4.4, 1, 2)
    of_f.axline((0, 0), slope=1, color="0.6", lw=0.9)
    for number, (name, view) in enumerate(views.items()):
        style: dict[str, Any] = {**line_style(number), "lw": 1.4}
        label, dotted = plain(f"{name}: {view}"), style | {"linestyle": ":"}
        for logits, line in ((view.logits, style | {"label": label}), (view.next_logits, dotted)):
            edges, counts = logits.coarse().values()
            share = 100 * counts / counts.sum() / np.diff(edges)
            middles = (edges[1:] + edges[:-1]) / 2
            of_logits.plot(middles, np.where(share > 0, share, np.nan), **line)
        if view.function != "softmax":
            of_f.plot(view.x, view.value, **style)
    of_f.set(title="f against the identity (grey)", ylabel="f(logit), equal mean over the logits")
    of_logits.set(title="logits before f: all; next words (dotted)", ylabel="% per unit")
    left, right = zip(*(view.x[[0, -1]] for view in views.values()), strict=True)
    for axes in (of_f, of_logits):
        axes.set(xlim=(min(left), max(right)), xlabel="logit")
    of_logits.set(yscale="log")
    of_logits.set_ylim(bottom=1e-4)
    legend(figure)
    return figure


COMMAND = Measurement(
    "function",
    "the function that a head applies to its logits",
    measure,
    (*TEXT, *DEVICE),
    runs="+",
    output="results/function",
)
