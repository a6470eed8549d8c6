"""The page and the picture of benchmarks.randomized, from its records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.studies.page import Result, results, row, sweep_rows, table
from benchmarks.studies.plan import Contender
from benchmarks.studies.records import Records, made_on
from hstree.lm._pictures import line_style, new_figure
from hstree.lm._pictures import picture as rendered

PICTURE = "randomized.png"
INTRODUCTION = """\
# Ensembles of randomized trees

Does an ensemble of randomized hierarchical softmaxes over random feature subsets beat one tree, and
what does the work: more vectors, different trees, or different features? Binary trees over the
1,000 most frequent words of Penn Treebank, an LSTM with D = 64 features, the first 300,000 words,
two epochs. Small on purpose, so that every question gets three seeds. ± is the standard deviation
over seeds. *Copies of one tree* have the same tree and vectors of their own; without a learned gate
and with all features they start equal, and only rounding errors, which the optimizer amplifies,
drive them apart: enough to raise the rank, and no gain. *Rank* is that of the matrix log P over
2,000 contexts of the test text, in float64 (at most 1,000). *Time* is CPU time of an epoch of
training, as a share of that of one tree.
"""
NOTHING = "No run has finished yet.\n"
BASE, SOFTMAX = "cluster-1", "softmax"


def page(contenders: Sequence[Contender], records: Records) -> str:
    """The page in Markdown."""
    found = results(contenders, records)
    if not found:
        return f"{INTRODUCTION}\n{NOTHING}"
    lines = [
        INTRODUCTION,
        *_table(found),
        f"![Validation perplexity against parameters]({PICTURE})",
        "",
        *_answers({result.contender.name: result for result in found}),
        "## Learning rates tried",
        "",
        "Validation perplexity of the first seed by the factor on the head's learning rate. The "
        "other trees have that of one tree.",
        "",
        *table(["head", "setting", "value: perplexity"], sweep_rows(contenders, records), left=3),
        "## Made by",
        "",
        "    python -m benchmarks.randomized --data ptb/",
        "",
        made_on(records.all()),
        "",
        "Records of all runs: [randomized.json](randomized.json).",
    ]
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Result]) -> list[str]:
    base = next((r.mean("seconds") for r in found if r.contender.name == BASE), None)
    rows = []
    for result in found:
        seconds, parameters = result.mean("seconds"), result.mean("head_parameters")
        rows.append(
            row([
                result.title,
                result.spread("valid", 2),
                result.spread("test", 2),
                f"{(parameters or 0) / 1e3:.0f} k",
                result.spread("rank", 0),
                f"{seconds / base:.2f}" if base and seconds else "",
            ])
        )  # fmt: skip
    return table(["head", "valid", "test", "parameters", "rank", "time"], rows)


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
)  # fmt: skip
"""Questions, with the contenders whose perplexities answer them."""


def _answers(found: dict[str, Result]) -> list[str]:
    rows = []
    for question, new, old in COMPARISONS:
        if new not in found or old not in found:
            continue
        pairs = zip(found[new].runs, found[old].runs, strict=False)
        changes = [100 * (a["valid"] / b["valid"] - 1) for a, b in pairs]
        mean = sum(changes) / len(changes)
        rows.append(
            row([question, f"{mean:+.1f}%", f"{min(changes):+.1f}% to {max(changes):+.1f}%"])
        )
    return [
        "## Answers",
        "",
        "Change of the validation perplexity, mean and range over seeds.",
        "",
        *table(["change", "perplexity", "range"], rows),
    ]


CURVES = {
    "trees, all features": (64, False),
    "trees, half of the features": (32, False),
    "trees, a quarter": (16, False),
    "copies, all features": (64, True),
    "copies, half of the features": (32, True),
}
"""Size of the feature subset, and whether all trees are the same."""


def pictures(contenders: Sequence[Contender], records: Records) -> dict[str, bytes]:
    """The picture by name of its file; none before a run has finished."""
    found = [r for r in results(contenders, records) if r.mean("valid") is not None]
    if not found:
        return {}
    figure = new_figure(8, 4)
    axes = figure.subplots()
    for number, (label, (subset, identical)) in enumerate(CURVES.items()):
        shape = {"recipe": "cluster", "gate": "uniform", "subset": subset, "identical": identical}
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
    return {PICTURE: rendered(figure)}
