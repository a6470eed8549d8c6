"""Pictures of what ensembles of trees do: agreement, loss by level, loss by frequency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hstree._figures import line_style, new_figure, picture, plain

from .frequency_loss import FrequencyBin
from .tree_loss import TreeLoss
from .tree_words import Agreement, FloatArray

_NUMBERED = 12  # trees up to which the matrices show their numbers
_FEWEST = 100  # tokens of which a mean is drawn


def level_names(loss: TreeLoss) -> list[str]:
    """Names of the columns of ``loss.parts``."""
    levels = loss.parts.shape[1] - 1
    return ["root", *(f"level {level + 1}" for level in range(1, levels)), "leaf groups"]


def agreement_picture(agreement: Agreement) -> bytes:
    """A PNG picture of the two symmetric matrices, with their numbers."""
    n = len(agreement.chance)
    both = np.stack([agreement.adjusted_rand, agreement.depth_correlation])
    others = both[np.isfinite(both) & ~np.eye(n, dtype=bool)]
    low, high = others.min(initial=0), others.max(initial=0.1)
    size = 2.2 + 0.55 * min(n, _NUMBERED)
    figure = new_figure(2 * size, size)
    for axes, matrix, title in zip(
        figure.subplots(1, 2),
        both,
        (
            "clusters under the root:\nadjusted Rand index",
            "depth where two words part:\nSpearman correlation",
        ),
        strict=True,
    ):
        shown = np.where(np.eye(n, dtype=bool), np.nan, matrix)
        image = axes.imshow(shown, cmap="cividis", vmin=low, vmax=high)
        if n <= _NUMBERED:
            for i, j in np.ndindex(n, n):
                value = matrix[i, j]
                number = "1" if i == j else "-" if np.isnan(value) else f"{value:.2f}"
                colour = "white" if i != j and value < (low + high) / 2 else "black"
                axes.text(j, i, number, ha="center", va="center", color=colour, fontsize=8)
            axes.set_xticks(range(n), range(1, n + 1))
            axes.set_yticks(range(n), range(1, n + 1))
        axes.set_xlabel("tree")
        axes.set_ylabel("tree")
        axes.set_title(title, fontsize=9)
        figure.colorbar(image, ax=axes, shrink=0.8)
    return picture(figure)


def level_picture(loss: TreeLoss) -> bytes:
    """A PNG picture of the loss of each tree, level by level, beside that of the mixture."""
    n_trees, n_parts = loss.parts.shape
    figure = new_figure(10.0, 2.6 + 0.3 * n_trees)
    stacked, visits = figure.subplots(1, 2, width_ratios=(3, 2))
    colours = _colours(n_parts)
    bars = [f"tree {t + 1}" for t in range(n_trees)]
    left = np.zeros(n_trees)
    for part, name in enumerate(level_names(loss)):
        values = loss.parts[:, part]
        if loss.reached[:, part].any():
            stacked.barh(bars, values, left=left, color=colours[part], label=name)
        left = left + values
    mixtures = {"equal weights": loss.uniform, "mixture": loss.mixture} if n_trees > 1 else {}
    stacked.barh(list(mixtures), list(mixtures.values()), color="0.6")
    totals = [*loss.trees, *mixtures.values()]
    for bar, total in enumerate(totals):
        stacked.text(total, bar, f" {total:.2f}", va="center", fontsize=8)
    stacked.invert_yaxis()
    stacked.set_xlim(0, 1.1 * max(totals))
    stacked.set_xlabel("loss (nats per token)")
    stacked.set_title("loss by level of the path", fontsize=9)
    seen = loss.tokens * loss.reached[:, :-1] >= _FEWEST
    levels = 1 + np.flatnonzero(seen[:, 1:].any(axis=0))  # below the root
    for t in range(n_trees):
        reached = loss.reached[t, levels]
        each = np.full(len(levels), np.nan)
        np.divide(loss.parts[t, levels], reached, out=each, where=seen[t, levels])
        visits.plot(levels + 1, each, "o", **line_style(t), ms=3, lw=1.2, label=f"tree {t + 1}")
    visits.axhline(np.log(2), color="0.4", lw=0.9, ls=":", label="log 2, a coin toss")
    visits.set_xticks(levels + 1, levels + 1)
    visits.set_ylim(0, 1.1 * visits.get_ylim()[1])
    visits.set_xlabel("level")
    visits.set_ylabel("nats per token that comes there")
    visits.set_title(f"decisions below the root ({_FEWEST} tokens or more)", fontsize=9)
    visits.grid(alpha=0.3)
    handles, labels = stacked.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", frameon=False, fontsize=8, ncols=7)
    visits.legend(frameon=False, fontsize=7)
    return picture(figure)


def frequency_picture(bins: Mapping[str, Sequence[FrequencyBin]]) -> bytes:
    """A PNG picture of the loss by rank of frequency, a bar for each run; with several runs also
    what each bin adds to the difference from the first run."""
    names, columns = list(bins), list(bins.values())
    first = columns[0]
    labels = [f.label for f in first]
    tokens = np.array([f.tokens for f in first], float)
    total = tokens.sum()
    losses = np.array([[f.loss for f in column] for column in columns])
    means = np.full(losses.shape, np.nan)
    np.divide(losses, tokens, out=means, where=tokens > 0)
    panels = 3 if len(names) > 1 else 2
    figure = new_figure(4.6 * panels, 4.4)
    all_axes = figure.subplots(1, panels)
    _grouped(all_axes[0], names, means)
    all_axes[0].set_ylabel("nats per token of the bin")
    all_axes[0].set_title("mean loss", fontsize=9)
    _grouped(all_axes[1], names, 100 * losses / losses.sum(axis=1, keepdims=True))
    share = 100 * tokens / total
    (mark,) = all_axes[1].plot(share, "_", color="black", ms=24, mew=1.5)
    all_axes[1].legend([mark], ["share of the tokens"], frameon=False, fontsize=8)
    all_axes[1].set_ylabel("share of the whole loss (%)")
    all_axes[1].set_title("where the loss is", fontsize=9)
    if panels == 3:
        difference = 1000 * (losses[1:] - losses[0]) / total
        _grouped(all_axes[2], names[1:], difference, begin=1)
        all_axes[2].axhline(0, color="black", lw=0.8)
        all_axes[2].set_ylabel("nats per 1,000 tokens of the text")
        all_axes[2].set_title(plain(f"loss above that of {names[0]}"), fontsize=9)
    for axes in all_axes:
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        axes.set_xlabel("rank of the word's training frequency")
        axes.grid(axis="y", alpha=0.3)
    handles, texts = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, texts, loc="outside lower left", frameon=False, fontsize=8, ncols=4)
    return picture(figure)


def _grouped(axes: Any, names: Sequence[str], values: FloatArray, begin: int = 0) -> None:
    """Bars side by side in each bin: values [runs, bins]."""
    width = 0.8 / len(names)
    for k, name in enumerate(names):
        place = np.arange(values.shape[1]) - 0.4 + (k + 0.5) * width
        colour = line_style(begin + k)["color"]
        axes.bar(place, values[k], width, color=colour, label=plain(name))


def _colours(n_parts: int) -> list[Any]:
    """Dark to light by level; the last, for leaf groups, is grey."""
    from matplotlib import colormaps

    levels = colormaps["viridis"](np.linspace(0, 1, max(n_parts - 1, 1)))
    return [*levels, "0.4"]
