"""Plot of the ranks of a matrix against the variance of added noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hstree.lm._pictures import line_style, new_figure

from .compute import NoisePoint

_MARKERS = "osD^v<>"


def noise_picture(points: Mapping[str, Sequence[NoisePoint]]) -> Any:
    """Plot Press ranks, measured and expected by the quarter-circle law, and the effective ranks of
    the last dtype against c. ``points``: by dtype, in increasing c."""
    figure = new_figure(7.6, 5.6)
    axes = figure.add_subplot()
    for number, (name, every) in enumerate(points.items()):
        own = [point for point in every if point.c > 0]
        c = [point.c for point in own]
        style = {"color": line_style(number)["color"], "lw": 1}
        label = f"Press rank, {name}"
        axes.plot(c, [point.press_rank for point in own], "o-", ms=4, label=label, **style)
        label = f"the same by the quarter-circle law, {name}"
        axes.plot(c, [point.expected for point in own], "o", mfc="none", ms=9, label=label, **style)
    for number, epsilon in enumerate(every[0].effective_ranks, start=len(points)):
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
