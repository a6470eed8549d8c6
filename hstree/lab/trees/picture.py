"""Plots of ensembles of trees: agreement, loss by level, loss by frequency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hstree.lm._pictures import line_style, new_figure, plain

from ..heat_map import NUMBERED, heat_map
from .clusters import Agreement
from .losses import FrequencyBin, TreeLoss

_FEWEST = 100  # a mean over fewer tokens is not drawn


def agreement_picture(agreement: Agreement) -> Any:
    """Plot the two symmetric matrices, with their numbers."""
    panels = {
        "clusters under the root:\nadjusted Rand index": agreement.adjusted_rand,
        "depth where two words part:\nSpearman correlation": agreement.depth_correlation,
    }
    n = len(agreement.chance)
    names = [str(tree + 1) for tree in range(n)]
    same = np.eye(n, dtype=bool)
    others = np.stack([*panels.values()])[:, ~same]
    low, high = np.nanmin(others, initial=0), np.nanmax(others, initial=0.1)
    size = 2.2 + 0.55 * min(n, NUMBERED)
    figure = new_figure(2 * size, size)
    for axes, (title, matrix) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        texts = [["-" if np.isnan(value) else f"{value:.2f}" for value in row] for row in matrix]
        for tree in range(n):
            texts[tree][tree] = "1"
        heat_map(axes, matrix, names, texts, cmap="cividis", vmin=low, vmax=high)
        axes.set(xlabel="tree", ylabel="tree")
        axes.set_title(title, fontsize=9)
    return figure


def level_picture(loss: TreeLoss) -> Any:
    """Plot the loss of each tree by level, and that of the mixture."""
    from matplotlib import colormaps

    parts, reached, levels = loss.parts, loss.reached, loss.levels
    trees = [f"tree {t + 1}" for t in range(len(parts))]
    figure = new_figure(10.0, 2.6 + 0.3 * len(trees))
    stacked, visits = figure.subplots(1, 2, width_ratios=(3, 2))

    colours = [*colormaps["viridis"](np.linspace(0, 1, len(levels) - 1)), "0.4"]
    left = parts.cumsum(axis=1) - parts
    for k in np.flatnonzero(reached.any(axis=0)):
        stacked.barh(trees, parts[:, k], left=left[:, k], color=colours[k], label=levels[k])
    mixtures = {"equal weights": loss.uniform, "mixture": loss.mixture} if len(trees) > 1 else {}
    stacked.barh([*mixtures], [*mixtures.values()], color="0.6")
    totals = [*loss.trees, *mixtures.values()]
    for bar, total in enumerate(totals):
        stacked.text(total, bar, f" {total:.2f}", va="center", fontsize=8)
    stacked.invert_yaxis()
    stacked.set(xlim=(0, 1.1 * max(totals)), xlabel="loss (nats per token)")
    stacked.set_title("loss by level of the path", fontsize=9)
    handles, labels = stacked.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8, ncols=7)

    with np.errstate(invalid="ignore"):  # 0 / 0 where there is no token
        each = np.where(loss.tokens * reached < _FEWEST, np.nan, parts / reached)[:, 1:-1]
    shown = np.flatnonzero(np.isfinite(each).any(axis=0))
    for t, name in enumerate(trees):
        visits.plot(shown + 2, each[t, shown], "o", **line_style(t), ms=3, lw=1.2, label=name)
    visits.axhline(np.log(2), color="0.4", lw=0.9, ls=":", label="log 2, a coin toss")
    visits.set_xticks(shown + 2)
    visits.set_ylim(0, 1.1 * visits.get_ylim()[1])
    visits.set(xlabel="level", ylabel="nats per token that comes there")
    visits.set_title(f"decisions below the root ({_FEWEST} tokens or more)", fontsize=9)
    visits.grid(alpha=0.3)
    visits.legend(frameon=False, fontsize=7)
    return figure


def frequency_picture(bins: Mapping[str, Sequence[FrequencyBin]]) -> Any:
    """Plot the loss by frequency rank, with a bar for each run; for several runs also the
    difference of each bin from the first run."""
    first, *others = bins
    labels = [f.label for f in bins[first]]
    tokens = np.array([f.tokens for f in bins[first]], float)
    losses = np.array([[f.loss for f in found] for found in bins.values()])
    means = [[f.mean for f in found] for found in bins.values()]
    shares = 100 * losses / losses.sum(axis=1, keepdims=True)
    panels: list[tuple[str, str, Any]] = [
        ("mean loss", "nats per token of the bin", means),
        ("where the loss is", "share of the whole loss (%)", shares),
    ]
    if others:
        difference = 1000 * (losses[1:] - losses[0]) / tokens.sum()
        title = plain(f"loss above that of {first}")
        panels.append((title, "nats per 1,000 tokens of the text", difference))
    figure = new_figure(4.6 * len(panels), 4.4)
    all_axes = figure.subplots(1, len(panels))
    for axes, (title, unit, values) in zip(all_axes, panels, strict=True):
        width = 0.8 / len(values)
        shown = list(enumerate(bins))[-len(values) :]  # all runs, or all but the first
        for k, ((run, name), heights) in enumerate(zip(shown, values, strict=True)):
            places = np.arange(len(labels)) - 0.4 + (k + 0.5) * width
            axes.bar(places, heights, width, color=line_style(run)["color"], label=plain(name))
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        axes.set(xlabel="rank of the word's training frequency", ylabel=unit)
        axes.set_title(title, fontsize=9)
        axes.grid(axis="y", alpha=0.3)
    (mark,) = all_axes[1].plot(100 * tokens / tokens.sum(), "_", color="black", ms=24, mew=1.5)
    all_axes[1].legend([mark], ["share of the tokens"], frameon=False, fontsize=8)
    if others:
        all_axes[2].axhline(0, color="black", lw=0.8)
    handles, texts = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower left", frameon=False, fontsize=8, ncols=4)
    return figure
