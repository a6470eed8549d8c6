"""Ranks of several matrices as a table and as pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree._figures import line_style, new_figure, picture, plain

from .rank import RankResult
from .table import Table, table

_POINTS = 1000


def rank_table(results: Mapping[str, RankResult]) -> Table:
    """A row for each matrix by its name."""
    found = list(results.values())
    epsilons = dict.fromkeys(epsilon for result in found for epsilon in result.effective_ranks)
    columns: list[tuple[str, bool, list[str]]] = [
        ("matrix", False, list(results)),
        ("rows", True, [f"{result.shape[0]:,}" for result in found]),
        ("columns", True, [f"{result.shape[1]:,}" for result in found]),
        ("dtype", False, [_name(result) for result in found]),
        ("route", False, [result.route for result in found]),
        ("largest singular value", True, [f"{result.s_max:.4g}" for result in found]),
        ("Press threshold", True, [f"{result.press_threshold:.3g}" for result in found]),
        ("Press rank", True, [f"{result.press_rank:,}" for result in found]),
    ]
    for epsilon in epsilons:
        ranks = [result.effective_ranks.get(epsilon) for result in found]
        cells = ["-" if rank is None else f"{rank:,}" for rank in ranks]
        columns.append((f"effective rank, epsilon {epsilon:g}", True, cells))
    return table("Press rank and effective ranks", columns)


def rank_rows(results: Mapping[str, RankResult]) -> list[dict[str, Any]]:
    """The table's figures in full digits, a row for each matrix."""
    return [
        {
            "matrix": name,
            "rows": result.shape[0],
            "columns": result.shape[1],
            "dtype": _name(result),
            "route": result.route,
            "s_max": result.s_max,
            "press_threshold": result.press_threshold,
            "error_bound": result.error_bound,
            "press_error": result.press_error,
            "press_rank": result.press_rank,
            **{f"effective_rank_{e:g}": rank for e, rank in result.effective_ranks.items()},
        }
        for name, result in results.items()
    ]


def _name(result: RankResult) -> str:
    return str(result.dtype).removeprefix("torch.")


def thinned(n: int, points: int = _POINTS) -> npt.NDArray[np.int64]:
    """At most ``points`` of the numbers 1 .. n, evenly spread on a logarithmic axis, both ends
    included."""
    if n <= points:
        return np.arange(1, n + 1)
    return np.unique(np.geomspace(1, n, points).round().astype(np.int64))


def spectrum_picture(results: Mapping[str, RankResult]) -> bytes:
    """Singular values over their index as shares of the largest, linear and logarithmic, with the
    Press thresholds."""
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
        if not common and name in thresholds:
            logarithmic.axhline(thresholds[name], color=style["color"], lw=0.8, ls=":")
    if common:
        logarithmic.axhline(next(iter(thresholds.values())), color="#000000", lw=0.9, ls=":")
    floor = min(thresholds.values(), default=1e-6)
    logarithmic.text(1.0, floor * 1.2, " Press threshold", fontsize=8, va="bottom")
    logarithmic.set_yscale("log")
    logarithmic.set_ylim(floor / 30, 2)
    linear.set_ylim(bottom=0)
    linear.set_title("linear, from the second on: the first is 1", fontsize=9)
    logarithmic.set_title("logarithmic", fontsize=9)
    for axes in (linear, logarithmic):
        axes.set_xscale("log")
        axes.set_xlim(_index_limits(results))
        axes.set_xlabel("index of the singular value (log scale)")
        axes.set_ylabel("singular value / largest singular value")
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return picture(figure)


def energy_picture(results: Mapping[str, RankResult]) -> bytes:
    """Share of the sum of squares that the k largest singular values leave, over k; a dot at each
    effective rank."""
    figure = new_figure(7.2, 4.4 + 0.2 * len(results))
    axes = figure.add_subplot()
    lowest, highest = 1.0, 0.0
    for number, (name, result) in enumerate(results.items()):
        style = line_style(number)
        squares = np.square(result.singular_values / (result.s_max or 1))
        left = np.append(np.cumsum(squares[::-1])[::-1][1:], 0.0) / (squares.sum() or 1)
        highest = max(highest, float(left[0]))
        index = np.arange(1, len(left) + 1)
        axes.plot(index, np.where(left > 0, left, np.nan), **style, lw=1.4, label=plain(name))
        for epsilon, rank in result.effective_ranks.items():
            lowest = min(lowest, epsilon)
            if rank:
                axes.plot([rank], [left[rank - 1]], "o", color=style["color"], ms=4)
    for epsilon in dict.fromkeys(e for result in results.values() for e in result.effective_ranks):
        axes.axhline(epsilon, color="#000000", lw=0.8, ls=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(_index_limits(results))
    axes.set_ylim(lowest / 30, min(1.0, 3 * max(highest, lowest)))
    axes.set_xlabel("k, number of singular values kept (log scale)")
    axes.set_ylabel("share of the sum of squares left out (log scale)")
    axes.set_title("dots: effective ranks; dotted lines: their epsilon", fontsize=9)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False, fontsize=8)
    return picture(figure)


def _index_limits(results: Mapping[str, RankResult]) -> tuple[float, float]:
    longest = max(len(result.singular_values) for result in results.values())
    return 0.8, 1.25 * longest
