"""Ranks of a matrix over the variance of the noise that is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hstree._dtypes import dtype_name
from hstree._figures import line_style, new_figure

from .compute import NoisePoint

_MARKERS = "osD^v<>"


def noise_picture(points: Sequence[NoisePoint]) -> Any:
    """A figure of Press rank and effective ranks, of the last dtype, over c, with what the
    quarter-circle law expects."""
    figure = new_figure(7.6, 5.6)
    axes = figure.add_subplot()
    noisy = sorted((point for point in points if point.c > 0), key=lambda point: point.c)
    dtypes = list(dict.fromkeys(point.dtype for point in points))
    for number, dtype in enumerate(dtypes):
        own = [point for point in noisy if point.dtype == dtype]
        c, name = [point.c for point in own], dtype_name(dtype)
        style = {"color": line_style(number)["color"], "lw": 1}
        found, expected = ([getattr(p, key) for p in own] for key in ("press_rank", "expected"))
        axes.plot(c, found, "o-", ms=4, label=f"Press rank, {name}", **style)
        law = f"the same by the quarter-circle law, {name}"
        axes.plot(c, expected, "o", mfc="none", ms=9, label=law, **style)
    for number, epsilon in enumerate(points[0].effective_ranks, start=len(dtypes)):
        ranks = [point.effective_ranks[epsilon] for point in own]
        style = {"color": line_style(number)["color"], "lw": 1}
        label = f"effective rank, epsilon {epsilon:g}, {name}"
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(c, ranks, f"{marker}--", ms=4, label=label, **style)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="c, variance of the noise times n squared (log scale)",
        ylabel="rank (log scale)",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=2)
    return figure
