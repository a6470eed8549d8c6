"""``hstree analyze tree``."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.lm._arguments import Argument
from hstree.lm._pictures import legend, line_style, panels, plain
from hstree.lm.data import Vocabulary
from hstree.lm.table import Table, count, decimals, table
from hstree.trees import Tree

from ..drawing import NUMBERED, heat_map
from ..report import Report, row_table
from ..runner import Measurement, load_runs
from .clusters import (
    Agreement,
    Cluster,
    heaviest_clusters,
    nearest_words,
    root_partition,
    tree_agreement,
)
from .losses import FrequencyBin, TreeLoss, frequency_loss, tree_head, tree_loss

IntArray = npt.NDArray[np.int64]

_WORDS = 6  # number of words to show if none is given


def measure(arguments: argparse.Namespace) -> Report:
    runs = load_runs(arguments, [arguments.directory, *arguments.against])
    own, run = next(iter(runs.items()))
    try:
        head = tree_head(run.model)
    except ValueError as error:
        raise ValueError(f"{arguments.directory}: {error}") from None
    trees, vocabulary = head.trees, run.vocabulary
    for name, other in runs.items():
        if other.vocabulary != vocabulary:
            raise ValueError(f"--against: expected the words of {own}, got others in {name}")
    for word in arguments.word or ():
        if word not in vocabulary:
            raise ValueError(f"--word: {word!r} is not in the vocabulary")
    corpus = run.corpus(arguments.settings.data, arguments.settings.column)

    loss = tree_loss(run.model, corpus.test)
    bins = {
        name: frequency_loss(each.model, corpus.test, vocabulary.frequencies)
        for name, each in runs.items()
    }
    clusters = [
        heaviest_clusters(tree, vocabulary, arguments.clusters, arguments.words) for tree in trees
    ]
    nearest = {
        word: [nearest_words(tree, vocabulary, word, arguments.words) for tree in trees]
        for word in arguments.word or _central_words(trees, vocabulary)
    }
    tables = [tree_table(loss, trees, vocabulary.frequencies), level_table(loss)]
    notes = [
        f"{loss.tokens:,} tokens of the test text of {corpus.name}, read as one stream: "
        "perplexities differ a little from those of hstree evaluate, which cuts it into several",
        f"gate {head.gate.name!r}: the weights spread over {loss.gate_perplexity:.2f} of "
        f"{len(trees)} trees (mean of exp entropy)",
    ]
    data = {"text": corpus.name, "loss": loss}
    pictures = {"loss-by-level": level_picture(loss)}
    if len(trees) > 1:
        agreement = tree_agreement(trees, vocabulary.frequencies)
        tables += [mixture_table(loss), agreement_table(agreement)]
        notes += [
            "the trees were trained as a mixture, so each may specialize: the loss of "
            "a single tree is not that of a tree trained alone",
            f"Spearman of depths: over {agreement.pairs:,} random pairs of words, of the depth of "
            "the node where they part; most pairs part at a wide root",
        ]
        data["agreement"] = agreement
        pictures["agreement"] = agreement_picture(agreement)
    tables += [frequency_table(bins), cluster_table(clusters), nearest_table(nearest)]
    data |= {"frequency": bins, "clusters": clusters, "nearest": nearest}
    pictures["loss-by-frequency"] = frequency_picture(bins)
    visits = np.round(loss.reached * loss.tokens).astype(int)
    rows = [
        ("level", own, t + 1, loss.levels[k], visits[t, k], loss.parts[t, k] * loss.tokens)
        for t, k in np.ndindex(visits.shape)
    ] + [
        ("frequency", name, None, f"ranks {f.first}-{f.last}", f.tokens, f.loss)
        for name, found in bins.items()
        for f in found
    ]
    keys = ("kind", "run", "tree", "where", "tokens", "loss")
    cells = [dict(zip(keys, row, strict=True)) for row in rows]
    return Report(f"The trees of {own}", tables, notes, data, cells, pictures)


def _central_words(trees: Sequence[Tree], vocabulary: Vocabulary) -> list[str]:
    """The most frequent words that are not directly under the root of any tree."""
    below = np.ones(len(vocabulary), bool)
    for tree in trees:
        partition = root_partition(tree, vocabulary.frequencies)
        below &= np.bincount(partition)[partition] > 1
    order = np.argsort(-vocabulary.frequencies, kind="stable")
    return vocabulary.decode(order[below[order]][:_WORDS])


def tree_table(loss: TreeLoss, trees: Sequence[Tree], frequencies: IntArray) -> Table:
    partitions = [root_partition(tree, frequencies) for tree in trees]
    alone = [np.bincount(partition)[partition] == 1 for partition in partitions]
    share = [100 * frequencies[which].sum() / frequencies.sum() for which in alone]
    return table(
        "Single trees",
        range(len(trees)),
        [
            ("tree", lambda t: t + 1),
            ("clusters", lambda t: int(partitions[t].max()) + 1, count),
            ("of one word", lambda t: int(alone[t].sum()), count),
            ("their share of the text (%)", lambda t: share[t], decimals(1)),
            ("mean depth", lambda t: trees[t].average_depth(frequencies), decimals(2)),
            ("height", lambda t: trees[t].height, str),
            ("loss", lambda t: loss.trees[t], decimals(4)),
            ("perplexity", lambda t: math.exp(loss.trees[t]), decimals(2)),
            ("mean weight", lambda t: loss.gate[t], decimals(3)),
        ],
    )


def level_table(loss: TreeLoss) -> Table:
    two, three, four = map(decimals, (2, 3, 4))
    rows: list[tuple[Any, ...]] = []
    for k in np.flatnonzero(loss.reached.any(axis=0)):
        came, lost = loss.reached[:, k].mean(), loss.parts[:, k].mean()
        share = 100 * lost / loss.trees.mean()
        rows.append((loss.levels[k], 100 * came, *loss.parts[:, k], share, lost / came))
    rows.append(("all", None, *loss.trees, 100, None))
    names = [f"tree {t + 1}" for t in range(len(loss.trees))]
    means = ("share of the loss (%)", "nats per token there")
    return row_table(
        "Loss by level (nats per token); shares and the last column: means over the trees",
        ("level", "tokens that reach it (%)", *names, *means),
        rows,
        *(None, two, *[four] * len(names), two, three),
    )


def mixture_table(loss: TreeLoss) -> Table:
    """A table of the steps from the mean loss of the trees to the loss of the mixture."""
    mean = float(loss.trees.mean())
    return table(
        "What mixing gains (nats per token)",
        [
            ("mean of the trees' losses", mean, None),
            ("mixture with equal weights", loss.uniform, mean - loss.uniform),
            ("mixture with the head's weights", loss.mixture, loss.uniform - loss.mixture),
        ],
        [
            ("", lambda step: step[0]),
            ("loss", lambda step: step[1], decimals(4)),
            ("perplexity", lambda step: math.exp(step[1]), decimals(2)),
            ("gain", lambda step: step[2], decimals(4)),
        ],
    )


def agreement_table(agreement: Agreement) -> Table:
    together, chance = 100 * agreement.together, 100 * agreement.chance
    first = "together in both, of those in the first (%)"
    return table(
        "Agreement of pairs of trees",
        itertools.combinations(range(len(chance)), 2),
        [
            ("trees", lambda pair: f"{pair[0] + 1}, {pair[1] + 1}"),
            ("adjusted Rand index", lambda pair: agreement.adjusted_rand[pair], decimals(3)),
            (first, lambda pair: together[pair], decimals(1)),
            ("of those in the second (%)", lambda pair: together[pair[::-1]], decimals(1)),
            ("by chance (%)", lambda pair: chance[list(pair)].mean(), decimals(1)),
            ("Spearman of depths", lambda pair: agreement.depth_correlation[pair], decimals(3)),
        ],
    )


def frequency_table(bins: Mapping[str, Sequence[FrequencyBin]]) -> Table:
    first = next(iter(bins.values()))
    whole = sum(f.tokens for f in first)
    percent = decimals(1)
    header = ["rank", "training occurrences", "tokens", "tokens (%)"]
    rows = [
        [f.label, _occurrences(f), count(f.tokens), percent(100 * f.tokens / whole)] for f in first
    ]
    rows.append(["all", "-", count(whole), percent(100)])
    for name, found in bins.items():
        loss = sum(f.loss for f in found)
        header += [f"{name}: loss", f"{name}: share (%)"]
        for row, f in zip(rows, found, strict=False):
            row += [decimals(3)(f.mean), percent(100 * f.loss / loss)]
        rows[-1] += [decimals(4)(loss / whole), percent(100)]
    title = "Loss by frequency of the word (nats per token, share of the run's whole loss)"
    return row_table(title, header, rows, None, None, str)


def _occurrences(found: FrequencyBin) -> str:
    return f"{found.most:,}" + (f" to {found.least:,}" if found.most > found.least else "")


def cluster_table(clusters: Sequence[Sequence[Cluster]]) -> Table:
    return table(
        "Heaviest clusters under the root",
        [(tree, cluster) for tree, found in enumerate(clusters, start=1) for cluster in found],
        [
            ("tree", lambda item: item[0]),
            ("words", lambda item: item[1].size, count),
            ("share of the text (%)", lambda item: 100 * item[1].share, decimals(2)),
            ("the most frequent of them", lambda item: " ".join(item[1].words)),
        ],
    )


def nearest_table(nearest: Mapping[str, Sequence[Sequence[tuple[str, int]]]]) -> Table:
    rows = [
        (word, tree, " ".join(f"{c}/{d}" for c, d in near) or "- (directly under the root)")
        for word, found in nearest.items()
        for tree, near in enumerate(found, start=1)
    ]
    header = ("word", "tree", "nearest words/depth of the node where they part")
    return row_table("Nearest words in each tree", header, rows, None)


_FEWEST = 100  # a mean over fewer tokens is not drawn


def agreement_picture(agreement: Agreement) -> Any:
    matrices = {
        "clusters under the root:\nadjusted Rand index": agreement.adjusted_rand,
        "depth where two words part:\nSpearman correlation": agreement.depth_correlation,
    }
    n = len(agreement.chance)
    names = [str(tree + 1) for tree in range(n)]
    same = np.eye(n, dtype=bool)
    others = np.stack([*matrices.values()])[:, ~same]
    low, high = np.nanmin(others, initial=0), np.nanmax(others, initial=0.1)
    size = 2.2 + 0.55 * min(n, NUMBERED)
    figure, both = panels(2 * size, size, 1, 2, grid=None)
    for axes, (title, matrix) in zip(both, matrices.items(), strict=True):
        texts = [["-" if np.isnan(value) else f"{value:.2f}" for value in row] for row in matrix]
        for tree in range(n):
            texts[tree][tree] = "1"
        heat_map(axes, matrix, names, texts, cmap="cividis", vmin=low, vmax=high)
        axes.set(xlabel="tree", ylabel="tree")
        axes.set_title(title, fontsize=9)
    return figure


def level_picture(loss: TreeLoss) -> Any:
    from matplotlib import colormaps

    parts, reached, levels = loss.parts, loss.reached, loss.levels
    trees = [f"tree {t + 1}" for t in range(len(parts))]
    figure, (stacked, visits) = panels(10.0, 2.6 + 0.3 * len(trees), 1, 2, width_ratios=(3, 2))
    stacked.grid(visible=False)

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
    legend(figure, *stacked.get_legend_handles_labels(), ncols=7)

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
    visits.legend(loc="upper right", frameon=False, fontsize=7)
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
    parts: list[tuple[str, str, Any]] = [
        ("mean loss", "nats per token of the bin", means),
        ("where the loss is", "share of the whole loss (%)", shares),
    ]
    if others:
        difference = 1000 * (losses[1:] - losses[0]) / tokens.sum()
        title = plain(f"loss above that of {first}")
        parts.append((title, "nats per 1,000 tokens of the text", difference))
    figure, all_axes = panels(4.6 * len(parts), 4.4, 1, len(parts), grid="y")
    for axes, (title, unit, values) in zip(all_axes, parts, strict=True):
        width = 0.8 / len(values)
        shown = list(enumerate(bins))[-len(values) :]  # all runs, or all but the first
        for k, ((run, name), heights) in enumerate(zip(shown, values, strict=True)):
            places = np.arange(len(labels)) - 0.4 + (k + 0.5) * width
            axes.bar(places, heights, width, color=line_style(run)["color"], label=plain(name))
        axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=8)
        axes.set(xlabel="rank of the word's training frequency", ylabel=unit)
        axes.set_title(title, fontsize=9)
    (mark,) = all_axes[1].plot(100 * tokens / tokens.sum(), "_", color="black", ms=24, mew=1.5)
    all_axes[1].legend([mark], ["share of the tokens"], frameon=False, fontsize=8)
    if others:
        all_axes[2].axhline(0, color="black", lw=0.8)
    legend(figure, *all_axes[0].get_legend_handles_labels(), ncols=4)
    return figure


COMMAND = Measurement(
    "tree",
    "words, agreement and losses of trees",
    """\
Analyze the trees of a run: the clusters of words in each tree, the agreement of the trees, the loss
on the test text by level of the paths, for each tree and the mixture, and the loss by frequency of
the word, compared with other runs of any head. Without --data, the text that the run was trained on
is read.
""",
    measure,
    (
        Argument("directory", "run folder of hstree train", metavar="RUN"),
        Argument(
            "--against",
            "runs of any head over the same words, to compare the loss by frequency with",
            [],
            metavar="RUN",
            nargs="+",
        ),
        Argument(
            "--word",
            "show the nearest words of this word in each tree; may be repeated (default: "
            "the most frequent words that are not directly under the root of any tree)",
            action="append",
            metavar="W",
        ),
        Argument("--clusters", "number of heaviest clusters to show for each tree", 8),
        Argument("--words", "number of words to show for a cluster, and of nearest words", 10),
    ),
    settings=("data", "column", "device", "threads"),
    output="results/tree",
)
