"""Plots of singular values, and of the share of squares that the largest ones leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hstree.lm._pictures import line_style, new_figure, plain

from .compute import RankResult


def spectrum_picture(results: Mapping[str, RankResult]) -> Any:
    """Plot the singular values against their index, as shares of the largest, with linear and
    logarithmic axes, and the Press thresholds."""
    figure = new_figure(10.5, 4.6 + 0.2 * len(results))
    linear, logarithmic = figure.subplots(1, 2)
    thresholds = {
        name: result.press_threshold / result.s_max
        for name, result in results.items()
        if result.s_max > 0
    }
    common = len({f"{value:.3g}" for value in thresholds.values()}) == 1
    for number, (name, result) in enumerate(results.items()):
        style = line_style(number)
        index = np.arange(1, len(result.singular_values) + 1)
        share = result.singular_values / (result.s_max or 1)
        label = f"{plain(name)}: Press rank {result.press_rank:,}"
        linear.plot(index[1:], share[1:], **style, lw=1.4, label=label)
        logarithmic.plot(index, np.where(share > 0, share, np.nan), **style, lw=1.4)
        if name in thresholds:
            colour = "#000000" if common else style["color"]
            logarithmic.axhline(thresholds[name], color=colour, lw=0.8, ls=":")
    floor = min(thresholds.values(), default=1e-6)
    logarithmic.text(1.0, floor * 1.2, " Press threshold", fontsize=8, va="bottom")
    logarithmic.set(yscale="log", ylim=(floor / 30, 2))
    linear.set_ylim(bottom=0)
    linear.set_title("linear, from the second on: the first is 1", fontsize=9)
    logarithmic.set_title("logarithmic", fontsize=9)
    for axes in (linear, logarithmic):
        axes.set(
            xscale="log",
            xlim=_index_limits(results),
            xlabel="index of the singular value (log scale)",
            ylabel="singular value / largest singular value",
        )
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def energy_picture(results: Mapping[str, RankResult]) -> Any:
    """Plot the share of the sum of squares that the k largest singular values leave out, against k,
    with a dot at each effective rank."""
    figure = new_figure(7.2, 4.4 + 0.2 * len(results))
    axes = figure.add_subplot()
    epsilons = {epsilon for result in results.values() for epsilon in result.effective_ranks}
    lowest = highest = min(epsilons, default=1.0)
    for number, (name, result) in enumerate(results.items()):
        style = line_style(number)
        squares = np.square(result.singular_values / (result.s_max or 1))
        left = np.append(np.cumsum(squares[::-1])[::-1][1:], 0.0) / (squares.sum() or 1)
        highest = max(highest, float(left[0]))
        index = np.arange(1, len(left) + 1)
        axes.plot(index, np.where(left > 0, left, np.nan), **style, lw=1.4, label=plain(name))
        dots = [rank for rank in result.effective_ranks.values() if rank]
        axes.plot(dots, [left[rank - 1] for rank in dots], "o", color=style["color"], ms=4)
    for epsilon in epsilons:
        axes.axhline(epsilon, color="#000000", lw=0.8, ls=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=_index_limits(results),
        ylim=(lowest / 30, min(1.0, 3 * highest)),
        xlabel="k, number of singular values kept (log scale)",
        ylabel="share of the sum of squares left out (log scale)",
    )
    axes.set_title("dots: effective ranks; dotted lines: their epsilon", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return figure


def _index_limits(results: Mapping[str, RankResult]) -> tuple[float, float]:
    return 0.8, 1.25 * max(len(result.singular_values) for result in results.values())
