"""Plot of the values of each model by seed, with mean and interval."""

from __future__ import annotations

import math
from typing import Any

from hstree.lm._pictures import line_style, new_figure, plain

from .compute import Significance


def significance_picture(result: Significance, quantity: str) -> Any:
    """Plot a row for each model: a dot for each seed, and above the dots the mean of the finite
    values with its 95% confidence interval. ``quantity``: label of the axis."""
    samples = result.samples
    figure = new_figure(7.2, 1.3 + 0.55 * len(samples))
    axes = figure.add_subplot()
    for row, sample in enumerate(samples):
        colour = line_style(row)["color"]
        values = [value for value in sample.values if math.isfinite(value)]
        axes.plot(values, [row + 0.14] * len(values), "o", color=colour, alpha=0.55, ms=5, mew=0)
        if math.isfinite(sample.mean):
            axes.plot([sample.mean], [row - 0.14], "D", color=colour, ms=6)
        if math.isfinite(sample.low):
            ends = [sample.low, sample.high]
            axes.plot(ends, [row - 0.14] * 2, "-|", color=colour, lw=2, ms=9, mew=2)
    labels = [plain(f"{sample.name} ({len(sample.values)})") for sample in samples]
    axes.set_yticks(range(len(samples)), labels)
    axes.set(ylim=(len(samples) - 0.5, -0.5), ylabel="model (runs)", xlabel=plain(quantity))
    axes.set_title("dots: runs; diamond: mean with its 95% confidence interval", fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    return figure
