"""The increasing function that a head applies to its logits, where the logits lie."""

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

from hstree.heads import FlatHead, Mixtape
from hstree.heads.flat import wide
from hstree.heads.functions import PLIF
from hstree.models import LanguageModel, read_contexts
from hstree.ops import LogitFunction, default_chunk_rows

FloatArray = npt.NDArray[np.float64]

POINTS = 257  # at which f is given
_WIDTH = 2.0**-10  # of the bins in which logits are counted; those of a PLIF end at its knots
_MOST_BINS = 1 << 22
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


@dataclass(frozen=True)
class Histogram:
    """How many numbers lie in each of B bins of equal width.

    Attributes:
        edges: [B + 1], increasing.
        counts: int64 [B].
    """

    edges: FloatArray
    counts: npt.NDArray[np.int64]

    @property
    def total(self) -> int:
        """How many numbers there are."""
        return int(self.counts.sum())

    @property
    def middles(self) -> FloatArray:
        """[B], the middle of each bin."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    def quantile(self, share: float) -> float:
        """The number below which this share of all lies; within a bin by straight interpolation."""
        below = np.concatenate([[0], np.cumsum(self.counts)])
        wanted = share * below[-1]
        k = int(np.argmax((below[1:] >= wanted) & (self.counts > 0)))
        within = (wanted - below[k]) / self.counts[k]
        return float(self.edges[k] + within * (self.edges[k + 1] - self.edges[k]))

    def coarse(self, bins: int) -> Histogram:
        """Groups of neighbouring bins taken together, at most ``bins`` of them."""
        group = -(-len(self.counts) // bins)
        padded = np.zeros(-(-len(self.counts) // group) * group, np.int64)
        padded[: len(self.counts)] = self.counts
        width = self.edges[1] - self.edges[0]
        edges = self.edges[0] + width * group * np.arange(len(padded) // group + 1)
        return Histogram(edges, padded.reshape(-1, group).sum(1))


class _Counter:
    """A histogram that grows with what it counts, in bins origin + [i w, (i + 1) w). w is doubled
    where more than ``_MOST_BINS`` would be needed."""

    def __init__(self, origin: float, width: float) -> None:
        self.origin = origin
        self.width = width
        self.first = 0
        self.counts = np.zeros(0, np.int64)

    def add(self, values: Tensor) -> None:
        """Count numbers, which are overwritten. Raises ValueError if one is not finite."""
        place = values.sub_(self.origin).mul_(1 / self.width).floor_()
        low, high = (float(v) for v in torch.aminmax(place))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("model: expected finite logits, got some that are not")
        first, last = int(low), int(high)
        if len(self.counts):
            first = min(first, self.first)
            last = max(last, self.first + len(self.counts) - 1)
        while last - first >= _MOST_BINS:
            first, last = first // 2, last // 2
            place.mul_(0.5).floor_()
            self._double()
        if last - first >= len(self.counts):
            grown = np.zeros(last - first + 1, np.int64)
            begin = self.first - first if len(self.counts) else 0
            grown[begin : begin + len(self.counts)] = self.counts
            self.first, self.counts = first, grown
        found = torch.bincount(place.sub_(self.first).int().flatten(), minlength=len(self.counts))
        self.counts += found.cpu().numpy()

    def _double(self) -> None:
        odd = self.first % 2
        counts = np.pad(self.counts, (odd, (odd + len(self.counts)) % 2))
        self.first, self.counts = (self.first - odd) // 2, counts.reshape(-1, 2).sum(1)
        self.width *= 2

    def histogram(self) -> Histogram:
        """What has been counted."""
        place = self.first + np.arange(len(self.counts) + 1.0)
        return Histogram(self.origin + self.width * place, self.counts)


@dataclass(frozen=True)
class FunctionView:
    """The function f of a head over the logits of a text. Logits, here, are what f is applied to.

    Attributes:
        head: name of the head.
        function: name of f; "softmax" is the identity.
        options: of f.
        components: K, logits that a class has in each context: 1 but for mixtures of softmaxes.
        radius: R, where f is given by a table over [-R, R] and goes on straight beyond; else None.
        logits: histogram of all logits, of every context, component and class, in narrow bins. A
            piecewise linear f is straight within each, unless logits spread over more than 2^22.
        next_logits: histogram of those of the words that came next.
        outside: share of all logits outside [-R, R]; None without a radius.
        x: [POINTS], evenly over the range of the logits.
        value: [POINTS], f(x) plus ``shift``.
        shift: the constant that makes the mean of f(logit) + shift that of the logits. A constant
            does not change the softmax.
        pieces: slopes f' in its pieces, each once: the K slopes of a piecewise linear function; of
            others f' at ``x``.
        slopes, next_slopes: f' in the bins of ``logits`` and ``next_logits``, at their middles.
        line: slope of the straight line that fits f(logit) best (least squares over all logits). A
            straight f is no more than a factor on the weights.
        bend: standard deviation of f(logit) from that line; 0 for a straight f.
    """

    head: str
    function: str
    options: dict[str, Any]
    components: int
    radius: float | None
    logits: Histogram
    next_logits: Histogram
    outside: float | None
    x: FloatArray
    value: FloatArray
    shift: float
    pieces: FloatArray
    slopes: FloatArray
    next_slopes: FloatArray
    line: float
    bend: float


def check_function_head(model: LanguageModel) -> FlatHead:
    """The head of a model, if it is a softmax of f(logits).

    Raises:
        ValueError: the head has no such function.
    """
    head = model.head
    if not isinstance(head, FlatHead) or isinstance(head, Mixtape):
        raise ValueError(
            f"model: expected a head that is a softmax, or a mixture of softmaxes, of f(W h + b), "
            f"got the head {head.name!r}, which applies no function to its logits"
        )
    return head


def view_function(model: LanguageModel, tokens: Any) -> FunctionView:
    """The function that a head applies to its logits, and where the logits of a text lie.

    The text is read as one stream, its logits in chunks: memory grows neither with the text nor
    with the number of logits. They are counted in narrow bins, and moments of f(logit) are taken at
    the middles of these.

    Args:
        model: with a head that :func:`check_function_head` takes.
        tokens: numpy ids [n], n >= 2.

    Raises:
        ValueError: another head, fewer than 2 tokens, or logits that are not finite.

    Source: Ganea et al., Breaking the Softmax Bottleneck via Learnable Monotonic Pointwise
    Non-linearities, 2019.
    """
    head = check_function_head(model)
    with torch.no_grad():
        function: LogitFunction = head.function(torch.float64)
    origin, width = 0.0, _WIDTH
    pieces: FloatArray | None = None
    if isinstance(head.function, PLIF):
        origin = -head.function.radius
        interval = 2 * head.function.radius / head.function.intervals
        width = interval / math.ceil(interval / _WIDTH)
        pieces = head.function.slopes().detach().double().cpu().numpy()
    every, following = _Counter(origin, width), _Counter(origin, width)
    for block, target in _logits(model, head, tokens):
        following.add(block.gather(1, target[:, None]))
        every.add(block)
    logits, next_logits = every.histogram(), following.histogram()
    value, slopes = value_and_slope(function, logits.middles)
    line, shift, bend = _straight_line(logits.middles, value, logits.counts)
    x = np.linspace(logits.edges[0], logits.edges[-1], POINTS)
    value, at_x = value_and_slope(function, x)
    radius = None if function.table is None else function.radius
    outside = None if radius is None else np.abs(logits.middles) > radius
    return FunctionView(
        head=head.name,
        function=head.function.name,
        options=head.function.config(),
        components=logits.total // (head.n_classes * (len(tokens) - 1)),
        radius=radius,
        logits=logits,
        next_logits=next_logits,
        outside=None if outside is None else float(logits.counts[outside].sum() / logits.total),
        x=x,
        value=value + shift,
        shift=shift,
        pieces=at_x if pieces is None else pieces,
        slopes=slopes,
        next_slopes=value_and_slope(function, next_logits.middles)[1],
        line=line,
        bend=bend,
    )


def value_and_slope(function: LogitFunction, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """f(x) and f'(x), elementwise."""
    device = None if function.table is None else function.table.device
    at = torch.tensor(x, dtype=torch.float64, device=device, requires_grad=True)
    with torch.enable_grad():
        value = function(at)
    (slope,) = torch.autograd.grad(value, at, torch.ones_like(value))
    return value.detach().cpu().numpy(), slope.cpu().numpy()


def _straight_line(
    x: FloatArray, y: FloatArray, weight: npt.NDArray[np.int64]
) -> tuple[float, float, float]:
    """Slope of the line that fits y best, the mean of x - y, and the standard deviation of y from
    the line."""
    share = weight / weight.sum()
    mean_x, mean_y = share @ x, share @ y
    dx, dy = x - mean_x, y - mean_y
    variance = share @ dx**2
    slope = float(share @ (dx * dy) / variance) if variance > 0 else math.nan
    bend = math.sqrt(share @ (dy - slope * dx) ** 2)
    return slope, float(mean_x - mean_y), bend


@torch.no_grad()
def _logits(model: LanguageModel, head: FlatHead, tokens: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, V] of one component in a few contexts, and the words that follow."""
    for hidden, target in read_contexts(model, tokens):
        latent, _ = head.components(head.encode(hidden))
        size = default_chunk_rows(hidden, head.n_classes)
        for rows, wanted in zip(torch.split(latent, size), torch.split(target, size), strict=True):
            for component in rows.unbind(1):
                yield wide(F.linear(component, head.weight, head.bias)), wanted
