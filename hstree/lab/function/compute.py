"""The increasing function f that a head applies to its logits, and the distribution of the
logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import at_least_float32
from hstree.heads import FlatHead, ForestSoftmax, Mixtape
from hstree.heads.functions import PLIF
from hstree.lm.models import LanguageModel, read_contexts
from hstree.ops import LogitFunction, default_chunk_rows

FloatArray = npt.NDArray[np.float64]

POINTS = 257  # number of points of f
_WIDTH = 2.0**-10  # width of the histogram bins of the logits; for a PLIF, bins end at its knots
_REACH = 1 << 21  # bins on each side


@dataclass(frozen=True)
class Histogram:
    """Counts of numbers in B bins of equal width: ``edges`` [B + 1], increasing, and ``counts``,
    int64 [B]."""

    edges: FloatArray
    counts: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """The number of counted numbers."""
        return int(self.counts.sum())

    @property
    def middles(self) -> FloatArray:
        """The middle of each bin, [B]."""
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
    """Counts numbers in bins origin + [i w, (i + 1) w), -_REACH <= i < _REACH; doubles w until they
    cover all."""

    def __init__(self, origin: float, width: float) -> None:
        self.origin, self.width = origin, width
        self.counts = np.zeros(2 * _REACH, np.int64)

    def add(self, values: Tensor) -> None:
        """Count numbers; overwrites them. Raises ValueError if one is not finite."""
        place = values.sub_(self.origin).mul_(1 / self.width).floor_()
        low, high = (float(v) for v in torch.aminmax(place))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("model: expected finite logits, got nan or infinity")
        while low < -_REACH or high >= _REACH:
            place.mul_(0.5).floor_()
            low, high, self.width = low // 2, high // 2, 2 * self.width
            self.counts = np.pad(self.counts.reshape(-1, 2).sum(1), _REACH // 2)
        found = torch.bincount(place.sub_(low).int().flatten()).cpu().numpy()
        first = int(low) + _REACH
        self.counts[first : first + len(found)] += found

    def histogram(self) -> Histogram:
        first, last = np.flatnonzero(self.counts)[[0, -1]]
        place = np.arange(first, last + 2.0) - _REACH
        return Histogram(self.origin + self.width * place, self.counts[first : last + 1])


@dataclass(frozen=True)
class FunctionView:
    """The function f of a head over the logits of a text. Here, logits are the arguments of f.

    Attributes:
        head: name of the head.
        function: name of f; "softmax" is the identity.
        options: options of f.
        components: number of logits of a class in each context, K: 1 except for mixtures of
            softmaxes.
        radius: radius R, if f is a table over [-R, R] and linear outside; otherwise None.
        outside: share of all logits outside [-R, R]; None without a radius.
        shift: constant that makes the mean of f(logit) + shift equal to the mean of the logits. A
            constant does not change the softmax.
        x: evenly spaced points over the range of the logits, [POINTS].
        value: f(x) + shift, [POINTS].
        line: slope of the least-squares line of f(logit) over all logits. A linear f only scales
            the weights.
        bend: standard deviation of f(logit) from that line; 0 for a linear f.
        logits: histogram of all logits, of every context, component and class, in narrow bins. A
            piecewise linear f is linear within each bin, unless the logits span more than 2^21
            bins.
        next_logits: histogram of the logits of the next words of the text.
        slopes: values of f' and their weights, by domain: ``"pieces of f"``, the K slopes of a
            piecewise linear function, or f' at ``x`` for others, with equal weights; ``"all
            logits"`` and ``"next words"``, f' at the middles of the histogram bins.
    """

    head: str
    function: str
    options: dict[str, Any]
    components: int
    radius: float | None
    outside: float | None
    shift: float
    x: FloatArray
    value: FloatArray
    line: float
    bend: float
    logits: Histogram
    next_logits: Histogram
    slopes: dict[str, tuple[FloatArray, npt.NDArray[Any]]]


def check_function_head(model: LanguageModel) -> FlatHead:
    head = model.head
    if not isinstance(head, FlatHead) or isinstance(head, (Mixtape, ForestSoftmax)):
        raise ValueError(
            "model: expected a head that is a softmax, or a mixture of softmaxes, of f(W h + b), "
            f"got the head {head.name!r}, which applies no function to its logits"
        )
    return head


def view_function(model: LanguageModel, tokens: Any) -> FunctionView:
    """Compute the function that a head applies to its logits, and the distribution of the logits of
    a text.

    The text is read as one stream, and its logits in chunks, so memory does not grow with the text
    or with the number of logits. Logits are counted in narrow bins, and moments of f(logit) are
    computed at the middles of the bins.

    Args:
        model: model with a head that ``check_function_head`` accepts.
        tokens: numpy array of class ids, [n], n >= 2.

    Raises:
        ValueError: another head, fewer than 2 tokens, or logits that are not finite.

    Source: Ganea et al., Breaking the Softmax Bottleneck via Learnable Monotonic Pointwise
    Non-linearities, 2019.
    """
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
def _logits(model: LanguageModel, head: FlatHead, tokens: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, V] of one component in a few contexts, and the words that follow."""
    for hidden, target in read_contexts(model, tokens):
        latent, _ = head.components(head.encode(hidden))
        size = default_chunk_rows(hidden, head.n_classes)
        for rows, wanted in zip(torch.split(latent, size), torch.split(target, size), strict=True):
            for component in rows.unbind(1):
                yield at_least_float32(F.linear(component, head.weight, head.bias)), wanted
