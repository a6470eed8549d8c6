"""The page and the picture of benchmarks.randomized, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.planned import Contender, Records, Result, results, sweep_table
from hstree.lab.report import Report, made_on
from hstree.lm.report import Column, Table, line_style, new_figure, table

INTRODUCTION = """\
Does an ensemble of randomized hierarchical softmaxes over random feature subsets beat one tree, and
what does the work: more vectors, different trees, or different features? Binary trees over the
1,000 most frequent words of Penn Treebank, an LSTM with D = 64 features, the first 300,000 words,
two epochs. Small on purpose, so that every question gets three seeds. ± is the standard deviation
over seeds. *Copies of one tree* have the same tree and vectors of their own; without a learned gate
and with all features they start equal, and only rounding errors, which the optimizer amplifies,
drive them apart: enough to raise the rank, and no gain. *Rank* is that of the matrix log P over
2,000 contexts of the test text, in float64 (at most 1,000). *Time* is CPU time of an epoch of
training, as a share of that of one tree. A *forest* is a mixture of softmaxes over one output
embedding, to which each tree adds the vectors of its 32 clusters (hstree.ForestSoftmax); its copies
of one tree start with small random vectors, since equal ones would stay equal.
"""
NOTHING = "No run has finished yet."
BASE, SOFTMAX = "cluster-1", "softmax"
FOREST = "forest-cluster-4-gate"


def report(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and its picture."""
    found = results(contenders, records)
    if not found:
        return Report("Ensembles of randomized trees", [], [NOTHING])
    return Report(
        "Ensembles of randomized trees",
        [_results(found), _answers(found), sweep_table(contenders, records)],
        [
            "the other trees have the factor of one tree on the head's learning rate, the other "
            "forests that of four trees",
            "forests and the mixture ran on another machine than the trees and the softmax: their "
            "times are not comparable",
        ],
        pictures={"": _picture([r for r in found if r.mean("valid") is not None])},
        introduction=INTRODUCTION,
        appendix="Records of all runs: [randomized.json](randomized.json).",
        made=made_on(records.all()),
    )


def _results(found: Sequence[Result]) -> Table:
    base = next((r.mean("seconds") for r in found if r.contender.name == BASE), None)

    def time(result: Result) -> str:
        seconds = result.mean("seconds")
        return f"{seconds / base:.2f}" if base and seconds else ""

    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("valid", lambda r: r.spread("valid", 2), str),
        ("test", lambda r: r.spread("test", 2), str),
        ("parameters", lambda r: f"{(r.mean('head_parameters') or 0) / 1e3:.0f} k", str),
        ("rank", lambda r: r.spread("rank", 0), str),
        ("time", time, str),
    ]
    return table("Results", found, columns)


COMPARISONS = (
    ("Copies of one tree instead of one", "cluster-4-copies", BASE),
    ("Copies with a learned gate", "cluster-4-copies-gate", BASE),
    ("Copies over different halves of the features", "cluster-4-s32-copies", BASE),
    ("Four different trees instead of one", "cluster-4", BASE),
    ("Different trees over halves of the features, parameters of one", "cluster-2-s32", BASE),
    ("Different trees over quarters of the features, parameters of one", "cluster-4-s16", BASE),
    ("Eight trees over halves, parameters of four", "cluster-8-s32", "cluster-4"),
    ("16 trees over quarters, parameters of four", "cluster-16-s16", "cluster-4"),
    ("A learned gate for four trees", "cluster-4-gate", "cluster-4"),
    ("16 trees instead of four", "cluster-16", "cluster-4"),
    ("Four random trees instead of one", "random-4", "random-1"),
    ("Four Huffman trees instead of one", "huffman-4", "huffman-1"),
    ("Four clustered trees instead of a softmax", "cluster-4", SOFTMAX),
    ("Forest of one tree instead of a softmax", "forest-cluster-1", SOFTMAX),
    ("Forest of four trees instead of a softmax", FOREST, SOFTMAX),
    ("Forest of four trees instead of a mixture of four softmaxes", FOREST, "mos-4"),
    ("Forest: four trees instead of one", FOREST, "forest-cluster-1"),
    ("Forest: 16 trees instead of four", "forest-cluster-16-gate", FOREST),
    ("Forest: copies of one tree instead", "forest-cluster-4-copies-gate", FOREST),
    ("Forest: random clusters instead of learned ones", "forest-random-4-gate", FOREST),
    ("Forest: trees over halves of the features", "forest-cluster-4-s32-gate", FOREST),
    ("Forest: weights 1 / 4 instead of a learned gate", "forest-cluster-4", FOREST),
)  # fmt: skip
"""Questions, with the contenders whose perplexities answer them."""


def _answers(found: Sequence[Result]) -> Table:
    runs: Mapping[str, Sequence[Mapping[str, Any]]] = {r.contender.name: r.runs for r in found}
    changes = [
        (question, [100 * (a["valid"] / b["valid"] - 1) for a, b in zip(runs[new], runs[old])])  # noqa: B905
        for question, new, old in COMPARISONS
        if new in runs and old in runs
    ]
    columns: list[Column] = [
        ("change", lambda row: row[0]),
        ("perplexity", lambda row: fmean(row[1]), "{:+.1f}%".format),
        ("range", lambda row: f"{min(row[1]):+.1f}% to {max(row[1]):+.1f}%", str),
    ]
    title = "Change of the validation perplexity, mean and range over seeds"
    return table(title, changes, columns)


_TREES = {"head": "trees", "recipe": "cluster", "gate": "uniform", "subset": 64, "identical": False}
CURVES: Mapping[str, Mapping[str, Any]] = {
    "trees, all features": _TREES,
    "trees, half of the features": _TREES | {"subset": 32},
    "trees, a quarter": _TREES | {"subset": 16},
    "copies, all features": _TREES | {"identical": True},
    "copies, half of the features": _TREES | {"subset": 32, "identical": True},
    "forest, learned gate": _TREES | {"head": "forest", "gate": "context"},
}
"""Settings of the runs of each curve."""


def _picture(found: Sequence[Result]) -> Any:
    """Validation perplexity against parameters."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for number, (label, shape) in enumerate(CURVES.items()):
        own = [r for r in found if shape.items() <= r.settings.items()]
        points = [(r.mean("head_parameters") or 0, r.mean("valid"), r) for r in own]
        points.sort(key=lambda point: point[0])
        x, y = [size / 1e3 for size, _, _ in points], [value for _, value, _ in points]
        axes.plot(x, y, marker="o", label=label, **line_style(number))
        for size, value, result in points:
            text = str(result.settings["n_trees"])
            axes.annotate(text, (size / 1e3, value), (3, 3), fontsize=7, textcoords="offset points")
    for result in found:
        if result.contender.name == SOFTMAX:
            axes.axhline(result.mean("valid"), color="gray", linestyle=":", label="softmax")
    axes.set(xscale="log", xlabel="parameters of the head, thousands (numbers: trees)")
    axes.set_ylabel("validation perplexity")
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize="small")
    return figure
