"""Ranks of a matrix over the variance of the noise that is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hstree._figures import line_style, new_figure

from .compute import NoisePoint, by_dtype

_MARKERS = "osD^v<>"


def noise_picture(points: Sequence[NoisePoint]) -> Any:
    """A figure of Press rank and effective ranks over c, with what the quarter-circle law expects;
    effective ranks are those of the last dtype."""
    figure = new_figure(7.6, 5.6)
    axes = figure.add_subplot()
    noisy = sorted((point for point in points if point.c > 0), key=lambda point: point.c)
    kinds = by_dtype(noisy)
    for number, (name, own) in enumerate(kinds.items()):
        c, style = [point.c for point in own], {"color": line_style(number)["color"], "lw": 1}
        found, expected = zip(*((point.press_rank, point.expected) for point in own), strict=True)
        law = f"the same by the quarter-circle law, {name}"
        axes.plot(c, found, "o-", ms=4, label=f"Press rank, {name}", **style)
        axes.plot(c, expected, "o", mfc="none", ms=9, label=law, **style)
    for number, epsilon in enumerate(own[0].effective_ranks, start=len(kinds)):
        axes.plot(
            c,
            [point.effective_ranks[epsilon] for point in own],
            _MARKERS[number % len(_MARKERS)] + "--",
            color=line_style(number)["color"],
            ms=4,
            lw=1,
            label=f"effective rank, epsilon {epsilon:g}, {name}",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="c, variance of the noise times n squared (log scale)",
        ylabel="rank (log scale)",
    )
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8, ncols=2)
    return figure
