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
from hstree.lm.report import Table, decimals, legend, line_style, panels, plain
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
    row_table,
)

FloatArray = npt.NDArray[np.float64]

POINTS = 257  # number of points of f
_WIDTH = 2.0**-10  # width of the histogram bins of the logits; for a PLIF, bins end at its knots
_REACH = 1 << 21  # bins on each side


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers in B bins of equal width."""

    edges: FloatArray  # [B + 1], increasing
    counts: npt.NDArray[np.int64]  # [B]

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def middles(self) -> FloatArray:
        return (self.edges[1:] + self.edges[:-1]) / 2

    def quantile(self, share: float) -> float:
        """The quantile of this share, with linear interpolation within a bin."""
        below = np.concatenate([[0], np.cumsum(self.counts)])
        wanted = share * below[-1]
        k = int(np.argmax((below[1:] >= wanted) & (self.counts > 0)))
        within = (wanted - below[k]) / self.counts[k]
        return float(self.edges[k] + within * (self.edges[k + 1] - self.edges[k]))

    def coarse(self, bins: int) -> Histogram:
        """The histogram with neighboring bins merged into at most ``bins``."""
        group = -(-len(self.counts) // bins)
        counts = np.add.reduceat(self.counts, np.arange(0, len(self.counts), group))
        width = group * (self.edges[1] - self.edges[0])
        return Histogram(self.edges[0] + width * np.arange(len(counts) + 1), counts)


class _Counter:
    """Counts numbers in bins origin + [i w, (i + 1) w), -_REACH <= i < _REACH."""

    def __init__(self, origin: float, width: float) -> None:
        self.origin, self.width = origin, width
        self.counts = np.zeros(2 * _REACH, np.int64)

    def add(self, values: Tensor) -> None:
        """Count numbers; overwrites them. Raises ValueError if one is not finite or beyond."""
        place = values.sub_(self.origin).mul_(1 / self.width).floor_()
        low, high = (float(v) for v in torch.aminmax(place))
        if not (low >= -_REACH and high < _REACH):  # or nan
            reach = f"{_REACH * self.width:,.0f}"
            raise ValueError(f"model: expected finite logits, from -{reach} to {reach}")
        found = torch.bincount(place.sub_(low).int().flatten()).cpu().numpy()
        first = int(low) + _REACH
        self.counts[first : first + len(found)] += found

    def histogram(self) -> Histogram:
        first, last = np.flatnonzero(self.counts)[[0, -1]]
        place = np.arange(first, last + 2.0) - _REACH
        return Histogram(self.origin + self.width * place, self.counts[first : last + 1])


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
    slopes: dict[str, tuple[FloatArray, npt.NDArray[Any]]]
    """Values of f' and their weights over the pieces of f (or at ``x`` for others), all logits and
    the next words."""


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
    origin, width = 0.0, _WIDTH
    if isinstance(head.function, PLIF):
        origin = -head.function.radius
        interval = 2 * head.function.radius / head.function.intervals
        width = interval / math.ceil(interval / _WIDTH)
    every, following = _Counter(origin, width), _Counter(origin, width)
    for block, target in _logits(model, head, tokens):
        following.add(block.gather(1, target[:, None]))
        every.add(block)
    logits, next_logits = every.histogram(), following.histogram()
    middles, counts = logits.middles, logits.counts
    _, next_slopes = value_and_slope(function, next_logits.middles)
    value, slopes = value_and_slope(function, middles)
    dx, dy = (v - np.average(v, weights=counts) for v in (middles, value))
    variance = np.average(dx**2, weights=counts)
    line = np.average(dx * dy, weights=counts) / variance if variance > 0 else math.nan
    shift = float(np.average(middles - value, weights=counts))
    x = np.linspace(logits.edges[0], logits.edges[-1], POINTS)
    value, pieces = value_and_slope(function, x)
    if isinstance(head.function, PLIF):
        pieces = head.function.slopes().detach().double().cpu().numpy()
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
            "pieces of f": (pieces, np.ones(len(pieces))),
            "all logits": (slopes, counts),
            "next words": (next_slopes, next_logits.counts),
        },
    )


def value_and_slope(function: LogitFunction, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    device = None if function.table is None else function.table.device
    at = torch.tensor(x, dtype=torch.float64, device=device, requires_grad=True)
    with torch.enable_grad():
        value = function(at)
    (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach().cpu().numpy(), slope.cpu().numpy()


def weighted_quantile(values: FloatArray, weight: npt.NDArray[Any], share: float) -> float:
    """The smallest value such that the values up to it have at least this share of the weight."""
    order = np.argsort(values)
    below = np.cumsum(weight[order])
    place = np.searchsorted(below, share * below[-1])
    return float(values[order[min(int(place), len(values) - 1)]])


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
    data = {name: function_data(view) for name, view in views.items()}
    pictures = {"of-the-logits": function_picture(views)}
    title = "The function that a head applies to its logits"
    return Report(title, function_tables(views), notes, data, pictures=pictures)


def function_tables(views: Mapping[str, FunctionView]) -> list[Table]:
    functions = [
        {"run": name, "head": view.head, "f": function_text(view)}
        | {"logits": f"{view.logits.total / 1e6:,.1f}M"}
        | {"outside [-R, R]": "-" if view.outside is None else f"{100 * view.outside:.3g}%"}
        | {"slope of the best line": view.line, "SD from that line": view.bend}
        for name, view in views.items()
    ]
    slopes = []
    for name, view in views.items():
        for over, of in view.slopes.items() if view.function != "softmax" else ():
            shown = (weighted_quantile(*of, share) for share in (0.05, 0.5, 0.95))
            slopes.append((name, over, np.average(of[0], weights=of[1]), *shown))
    forms: dict[str, Form] = {"slope of the best line": ",.3f", "SD from that line": ",.3f"}
    forms |= {"logits": str, "outside [-R, R]": str}
    tables = [record_table("Function f of the logits", functions, forms)]
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


BINS = 120  # of the logits


def function_picture(views: Mapping[str, FunctionView]) -> Any:
    """Plot f against the identity, and the logits. ``views``: by name of the run."""
    figure, (of_f, of_logits) = panels(10.0, 4.4, 1, 2)
    of_f.axline((0, 0), slope=1, color="0.6", lw=0.9)
    for number, (name, view) in enumerate(views.items()):
        style: dict[str, Any] = {**line_style(number), "lw": 1.4}
        label, dotted = plain(f"{name}: {function_text(view)}"), style | {"linestyle": ":"}
        for logits, line in ((view.logits, style | {"label": label}), (view.next_logits, dotted)):
            histogram = logits.coarse(BINS)
            share = 100 * histogram.counts / histogram.total / np.diff(histogram.edges)
            of_logits.plot(histogram.middles, np.where(share > 0, share, np.nan), **line)
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


def function_text(view: FunctionView) -> str:
    """The function with its options, such as ``gss(c=-1.5, k=2.5)``."""
    if view.function == "softmax":
        return "identity"
    options = ", ".join(f"{name}={value}" for name, value in view.options.items())
    return f"{view.function}({options})" if options else view.function


COMMAND = Measurement(
    "function",
    "the function that a head applies to its logits",
    measure,
    (*TEXT, *DEVICE),
    runs="+",
    output="results/function",
)
