"""Tables, pictures, notes and plain data of the synthetic bottleneck experiment."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from hstree._figures import line_style, new_figure, picture, plain
from hstree.analysis import Table, table
from hstree.analysis.table import count, decimals

from .synthetic import SyntheticCell, SyntheticResult

_MARKERS = "osD^vP*X"


def synthetic_tables(result: SyntheticResult) -> list[Table]:
    """Mode matching and divergence for each alpha, then the heads' parameters: a row for each head,
    a column for each dimension; mean and standard deviation over seeds."""
    setting = result.setting
    several = setting.seeds > 1
    cells = {(cell.alpha, cell.head, cell.dimension): cell for cell in result.cells()}
    labels = [choice.label for choice in setting.heads]
    spread = ", mean and standard deviation over seeds" if several else ""
    tables = []
    for alpha in setting.alphas:
        for measure, digits, title in (
            ("mode_matching", 1, "Mode matching (% of contexts)"),
            ("divergence", 3, "KL(P* || P), cross-entropy less entropy (nats)"),
        ):
            columns: list[tuple[str, bool, list[str]]] = [("head", False, labels)]
            for dimension in setting.dimensions:
                column = [cells[alpha, label, dimension] for label in labels]
                shown = [_mean_and_deviation(cell, measure, digits, several) for cell in column]
                columns.append((f"D={dimension}", True, shown))
            tables.append(table(f"{title}, alpha = {alpha:g}{spread}", columns))
    sizes = {(fit.head, fit.dimension): fit.parameters for fit in result.fits}
    columns = [("head", False, labels)]
    for dimension in setting.dimensions:
        columns.append(
            (f"D={dimension}", True, [count(sizes[label, dimension]) for label in labels])
        )
    tables.append(table("Parameters of the head, context vectors apart", columns))
    return tables


def _mean_and_deviation(cell: SyntheticCell, measure: str, digits: int, several: bool) -> str:
    mean, deviation = getattr(cell, measure), getattr(cell, f"{measure}_deviation")
    if not math.isfinite(mean):
        return "diverged"
    return decimals(mean, digits) + (f" ± {decimals(deviation, digits)}" if several else "")


def synthetic_picture(result: SyntheticResult, alpha: float) -> bytes:
    """A PNG of mode matching and divergence against the dimension for one alpha, a line for each
    head, bars of one standard deviation over seeds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    setting = result.setting
    rows = -(-len(setting.heads) // 4)
    figure = new_figure(9.6, 4.2 + 0.22 * rows)
    left, right = figure.subplots(1, 2)
    for number, choice in enumerate(setting.heads):
        cells = [c for c in result.cells() if (c.alpha, c.head) == (alpha, choice.label)]
        cells.sort(key=lambda cell: cell.dimension)
        dimensions = [cell.dimension for cell in cells]
        style: dict[str, Any] = {
            **line_style(number),
            "marker": _MARKERS[number % len(_MARKERS)],
            "zorder": 3 - number / 100,  # the first lie on top
            "ms": 4.5,
            "lw": 1.4,
            "elinewidth": 0.8,
            "capsize": 2,
            "label": plain(choice.label),
        }
        left.errorbar(
            dimensions,
            [cell.mode_matching for cell in cells],
            yerr=[cell.mode_matching_deviation for cell in cells],
            **style,
        )
        finite = [cell for cell in cells if 0 < cell.divergence < math.inf]
        right.errorbar(
            [cell.dimension for cell in finite],
            [cell.divergence for cell in finite],
            yerr=[min(cell.divergence_deviation, 0.9 * cell.divergence) for cell in finite],
            **style,
        )
    baseline = next(each for each in result.baselines if each.alpha == alpha)
    reference = {"color": "0.5", "linestyle": (0, (1, 2)), "lw": 1.0}
    left.axhline(baseline.mode_matching, **reference)
    right.axhline(baseline.divergence, **reference, label="one prediction for all contexts")
    left.set_ylabel("contexts whose mode is matched (%)")
    left.set_ylim(0, 102)
    right.set_ylabel("KL(P* || P) (nats, log scale)")
    right.set_yscale("log")
    low, high = right.get_ylim()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8)
    right.yaxis.set_major_locator(LogLocator(subs=subs))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(setting.dimensions, [str(value) for value in setting.dimensions])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("dimension D of a context vector (log scale)")
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{setting.contexts} contexts, {setting.outcomes} outcomes, "
        f"targets ~ Dirichlet({alpha:g}), {setting.seeds} "
        + ("seeds" if setting.seeds > 1 else "seed"),
        fontsize=10,
    )
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return picture(figure)


def synthetic_notes(result: SyntheticResult) -> list[str]:
    """What a reader must know beside the figures, a sentence each."""
    setting = result.setting
    notes = [
        f"alpha = {each.alpha:g}: the mean entropy of the targets is {each.entropy:.3f} nats; "
        f"their mean as the prediction for every context is {each.divergence:.3f} nats away and "
        f"matches {each.mode_matching:.1f} % of the modes."
        for each in result.baselines
    ]
    rates = ", ".join(f"{rate:g}" for rate in setting.learning_rates)
    again = ", and that rate with the other seeds" if setting.seeds > 1 else ""
    notes.append(
        f"{setting.steps} steps of Adam at most, on all contexts at once; of the learning rates "
        f"{rates} the one with the least divergence on the first seed{again}, for each head, D "
        "and alpha."
    )
    lowest, highest = min(setting.learning_rates), max(setting.learning_rates)
    cells = result.cells()
    if lowest < highest:
        ends = [sum(cell.learning_rate == end for cell in cells) for end in (lowest, highest)]
        notes.append(
            f"Of {len(cells)} choices of a learning rate {ends[0]} fell on the least and "
            f"{ends[1]} on the greatest."
        )
    options = [
        f"{choice.label} ({', '.join(f'{key}={value}' for key, value in choice.options.items())})"
        for choice in setting.heads
        if choice.options
    ]
    if options:
        notes.append(f"Options of the heads: {'; '.join(options)}.")
    return notes


def synthetic_data(result: SyntheticResult) -> dict[str, Any]:
    """Everything in full digits, JSON-able."""
    return dataclasses.asdict(result) | {
        "cells": [dataclasses.asdict(cell) for cell in result.cells()]
    }
