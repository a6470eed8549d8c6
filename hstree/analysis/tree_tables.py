"""Tables of what ensembles of trees do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hstree.trees import Tree

from .frequency_loss import FrequencyBin
from .table import Table, count, decimals, table
from .tree_loss import TreeLoss
from .tree_plot import level_names
from .tree_words import Agreement, Cluster, root_partition


def tree_table(loss: TreeLoss, trees: Sequence[Tree], frequencies: npt.ArrayLike) -> Table:
    """Each tree: its shape, its loss by itself, its weight in the mixture."""
    weight = np.asarray(frequencies, np.float64)
    rows = []
    for t, tree in enumerate(trees):
        partition = root_partition(tree, weight)
        sizes = np.bincount(partition)
        alone = sizes[partition] == 1
        rows.append(
            (
                str(t + 1),
                count(len(sizes)),
                count(int(alone.sum())),
                decimals(100 * float(weight[alone].sum() / weight.sum()), 1),
                decimals(tree.average_depth(weight), 2),
                str(tree.height),
                decimals(float(loss.trees[t]), 4),
                decimals(math.exp(loss.trees[t]), 2),
                decimals(float(loss.gate[t]), 3),
            )
        )
    header = (
        "tree",
        "clusters",
        "of one word",
        "their share of the text (%)",
        "mean depth",
        "height",
        "loss",
        "perplexity",
        "mean weight",
    )
    return Table("Trees, each by itself", header, tuple(rows), (False, *[True] * 8))


def mixture_table(loss: TreeLoss) -> Table:
    """From the mean tree to the mixture, step by step."""
    steps = (
        ("mean of the trees' losses", loss.mean_tree, None),
        ("mixture with equal weights", loss.uniform, loss.mean_tree - loss.uniform),
        ("mixture with the head's weights", loss.mixture, loss.uniform - loss.mixture),
    )
    columns = [
        ("", False, [name for name, *_ in steps]),
        ("loss", True, [decimals(value, 4) for _, value, _ in steps]),
        ("perplexity", True, [decimals(math.exp(value), 2) for _, value, _ in steps]),
        ("gain", True, [decimals(gain, 4) for *_, gain in steps]),
    ]
    return table("What mixing gains (nats per token)", columns)


def level_table(loss: TreeLoss) -> Table:
    """The loss by level, for each tree and in the mean of the trees."""
    n_trees = len(loss.parts)
    shown = [
        (name, loss.reached[:, k], loss.parts[:, k])
        for k, name in enumerate(level_names(loss))
        if loss.reached[:, k].any()
    ]
    mean = loss.mean_tree
    visit = [float(parts.sum() / reached.sum()) for _, reached, parts in shown]
    columns = [
        ("level", False, [*(name for name, *_ in shown), "all"]),
        (
            "tokens that come there (%)",
            True,
            [*(decimals(100 * float(reached.mean()), 2) for _, reached, _ in shown), "-"],
        ),
    ]
    for t in range(n_trees):
        cells = [decimals(float(parts[t]), 4) for *_, parts in shown]
        columns.append((f"tree {t + 1}", True, [*cells, decimals(float(loss.trees[t]), 4)]))
    share = [decimals(100 * float(parts.mean() / mean), 2) for *_, parts in shown]
    columns += [
        ("share of the loss (%)", True, [*share, decimals(100.0, 2)]),
        ("nats per token there", True, [*(decimals(value, 3) for value in visit), "-"]),
    ]
    return table(
        "Loss by level (nats per token); shares and the last column: means over the trees", columns
    )


def agreement_table(agreement: Agreement) -> Table:
    """A row for each pair of trees."""
    n = len(agreement.chance)
    pairs = [(i, j) for i in range(n) for j in range(i + 1, n)]
    together = [
        (agreement.together[i, j], agreement.together[j, i], agreement.chance[[i, j]].mean())
        for i, j in pairs
    ]
    columns = [
        ("trees", False, [f"{i + 1}, {j + 1}" for i, j in pairs]),
        (
            "adjusted Rand index",
            True,
            [decimals(float(agreement.adjusted_rand[p]), 3) for p in pairs],
        ),
        (
            "together in both, of those in the first (%)",
            True,
            [decimals(100 * float(row[0]), 1) for row in together],
        ),
        (
            "of those in the second (%)",
            True,
            [decimals(100 * float(row[1]), 1) for row in together],
        ),
        ("by chance (%)", True, [decimals(100 * float(row[2]), 1) for row in together]),
        (
            "Spearman of depths",
            True,
            [decimals(float(agreement.depth_correlation[p]), 3) for p in pairs],
        ),
    ]
    return table("Agreement of pairs of trees", columns)


def cluster_table(clusters: Sequence[Sequence[Cluster]], words: Sequence[str]) -> Table:
    """The heaviest clusters of each tree, by their words."""
    rows = [
        (
            str(t + 1),
            count(cluster.size),
            decimals(100 * cluster.share, 2),
            " ".join(words[c] for c in cluster.classes),
        )
        for t, found in enumerate(clusters)
        for cluster in found
    ]
    header = ("tree", "words", "share of the text (%)", "the most frequent of them")
    return Table(
        "Heaviest clusters under the root", header, tuple(rows), (False, True, True, False)
    )


def sibling_table(
    siblings: Mapping[str, Sequence[Sequence[tuple[int, int]]]], words: Sequence[str]
) -> Table:
    """For each word what stands nearest to it in each tree."""
    rows = [
        (
            word,
            str(t + 1),
            " ".join(f"{words[c]}/{depth}" for c, depth in near) or "- (right under the root)",
        )
        for word, trees in siblings.items()
        for t, near in enumerate(trees)
    ]
    header = ("word", "tree", "nearest words/depth of the node where they part")
    return Table("Nearest words in each tree", header, tuple(rows), (False,) * 3)


def frequency_table(bins: Mapping[str, Sequence[FrequencyBin]]) -> Table:
    """Loss by rank of the word's frequency in the training text, the runs side by side."""
    first = next(iter(bins.values()))
    total = sum(f.tokens for f in first)
    columns = [
        ("rank", False, [*(f.label for f in first), "all"]),
        ("training occurrences", False, [*(_occurrences(f) for f in first), "-"]),
        ("tokens", True, [*(count(f.tokens) for f in first), count(total)]),
        (
            "tokens (%)",
            True,
            [*(decimals(100 * f.tokens / total, 1) for f in first), decimals(100.0, 1)],
        ),
    ]
    for name, found in bins.items():
        whole = sum(f.loss for f in found)
        means = [*(decimals(f.mean, 3) for f in found), decimals(whole / total, 4)]
        shares = [*(decimals(100 * f.loss / whole, 1) for f in found), decimals(100.0, 1)]
        columns += [(f"{name}: loss", True, means), (f"{name}: share (%)", True, shares)]
    title = "Loss by frequency of the word (nats per token, share of the run's whole loss)"
    return table(title, columns)


def _occurrences(found: FrequencyBin) -> str:
    if found.most == found.least:
        return f"{found.most:,}"
    return f"{found.most:,} to {found.least:,}"
