"""The tables of README.md and docs/ that are made of the figures in benchmarks/results.

    python -m benchmarks.front

replaces the lines between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` in README.md,
docs/index.md, docs/decoding.md and docs/transformers.md, and time, memory and parameters in the
rows of docs/heads.md, and draws which-head.png. ``quotes`` are the phrases of README.md with
figures, as the records have them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import classification
from benchmarks.decoding import DEFAULT_TREES, QUESTIONS, SOFTMAX
from benchmarks.heads import FLAT
from benchmarks.optimizers import TRAINING_SIZES
from benchmarks.planned import Records, results
from benchmarks.table import HEAD_TABLES, Record, ratio, sources
from benchmarks.trees_study import CONTENDERS
from hstree.lm.report import decimals, markdown, new_figure, picture, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / page for page in ("README.md", "docs/index.md")]
ALL = next(iter(QUESTIONS))
UNIT = "linear"

# Contestants of the training steps, as README calls them, with those of benchmarks.trees_study.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "softmax"),
    "softmax": ("`hstree.Softmax`", "softmax"),
    "adaptive": ("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
    "sampled": ("`hstree.SampledSoftmax`", "sampled-in-batch-128"),
    "forest, sampled": ("`hstree.ForestSoftmax`, 512 negatives", "forest-sampled-decay-0.1"),
    "trees": ("`hstree.TreeEnsemble`, 4 trees", "leaves-4x256-decay-0.1"),
    "trees, groups, sparse": ("4 trees, `leaf=16, sparse=True`", "leaves-4x256-groups"),
}


def front_table(speed: Record, perplexity: dict[str, float | None]) -> str:
    """Time, memory and perplexity of a softmax, the adaptive softmax and trees, from the record of
    benchmarks.table and test perplexities by contestant of benchmarks.trees_study."""
    there = [speed["cpu"][f"training steps, V = {size.classes}"] for size in TRAINING_SIZES]
    last = TRAINING_SIZES[-1]

    def times(contest: dict[str, Any], name: str) -> float | None:
        return ratio(contest["contestants"], UNIT, name)

    def mebibytes(name: str) -> float:
        return there[-1]["contestants"][name]["peak_bytes"] / 2**20

    columns: list[Any] = [("output layer: speed at", lambda name: ROWS[name][0])]
    columns += [
        (f"V = {size.classes:,}", partial(times, contest), _times)
        for size, contest in zip(TRAINING_SIZES, there, strict=True)
    ]
    columns += [
        (f"memory, V = {last.classes:,}", mebibytes, "{:,.0f} MiB".format),
        ("test perplexity", lambda name: perplexity[ROWS[name][1]], decimals(1)),
    ]
    seconds = (median(contest["contestants"][UNIT]["seconds"]) for contest in there)
    unit = ", ".join(f"{1000 * s:,.0f} ms" for s in seconds)
    note = (
        "Speed: training steps of the layer per second (forward, backward, fused AdamW; "
        f"{last.rows} rows of {last.features} features, one core) as a multiple of the first "
        f"row's, whose steps take {unit}. Memory: what the first step adds to the process, "
        "gradients and optimizer state included, parameters not. Test perplexity: Penn Treebank, "
        "V = 10,000, five epochs of a small LSTM, not converged, one to three seeds, with a weight "
        "decay of 0.1 (forest, 4 trees) or 0.01 (others; with 0.1 a softmax has "
        f"{perplexity['softmax-decay-0.1']:.1f}, a sampled one with 512 negatives "
        f"{perplexity['sampled-in-batch-512-decay-0.1']:.1f}). "
        f"{sources(there)}"
    )
    _, _, shown = markdown([table("", ROWS, columns)]).partition("\n\n")  # no title
    return "\n".join([shown, *textwrap.wrap(note, 120, break_on_hyphens=False)])


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def replaced(text: str, name: str, table: str) -> str:
    """The text with the table between the markers of that name. Raises ValueError unless it has
    both once, in order."""
    begin, end = (f"<!-- {name}: {place} -->" for place in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected one {begin} and one {end} after it")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def recorded(name: str) -> str:
    """The tables of a page in benchmarks/results."""
    text = (RESULTS / name).read_text()
    return text.partition("\n")[2].partition("\n- ")[0].strip()


COST = re.compile(
    r"^\| (.+): (all classes|top 10|top 1|a draw) \| ([\d.]+) .*\| ([\d.]+) .*\|$", re.M
)


def decoding_costs() -> str:
    """Times of queries for one row and for 32, by head."""
    found = COST.findall((RESULTS / "cpu.md").read_text().partition("\n## Decoding")[2])
    costs = {(head, query): times for head, query, *times in found}
    heads, queries = (list(dict.fromkeys(key[place] for key in costs)) for place in (0, 1))
    columns: list[Any] = [("", str)]
    for place, n in enumerate((1, 32)):
        for query in queries:
            get = partial(lambda place, query, head: costs[head, query][place], place, query)
            columns.append((f"{query}, N = {n}", get))
    _, _, shown = markdown([table("", heads, columns)]).partition("\n\n")
    return shown.strip()


FILLED: dict[str, dict[str, Callable[[], str]]] = {
    "docs/decoding.md": {"costs": decoding_costs, "screened": partial(recorded, "screened.md")},
    "docs/models.md": {"lm_head": partial(recorded, "lm_head.md")},
    "docs/transformers.md": {"generation": partial(recorded, "generation.md")},
}


HEAD_ROW = re.compile(
    r"^(\| (?:[^|]*[,:] )?`([\w., -]+)` \| [^|]+ \|)[^|]*\|[^|]*\|[^|]*\|$", re.MULTILINE
)


def with_head_figures(text: str, speed: Record) -> str:
    """The text with the figures of the heads that were timed, in the rows of their table."""
    contests = [speed["cpu"][name]["contestants"] for name in HEAD_TABLES]

    def row(match: re.Match[str]) -> str:
        name = FLAT if match[2] == "F.cross_entropy" else match[2]
        contest = next((contest for contest in contests if name in contest), None)
        if contest is None:
            return match[0]
        time, memory = (ratio(contest, name, FLAT, figure) for figure in ("seconds", "peak_bytes"))
        parameters = contest[name]["parameters"] / 1e6
        return f"{match[1]} {time:.2f} | {memory:.2f} | {parameters:.2f} M |"

    return HEAD_ROW.sub(row, text)


def records() -> tuple[Record, dict[str, float | None]]:
    """The speeds, and the test perplexities by contestant of benchmarks.trees_study."""
    study = results(CONTENDERS, Records(RESULTS / "trees-study.json"))
    speed = json.loads((RESULTS / "cpu.json").read_text())
    return speed, {result.contender.name: result.mean("test") for result in study}


def cells(page: str, section: str, row: str) -> list[str]:
    """The cells of a row of a table in benchmarks/results, by its first cell; the table is the
    first with such a row after the text ``section``."""
    text = (RESULTS / page).read_text(encoding="utf-8").partition(section)[2]
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def quotes() -> list[str]:
    """Phrases of README.md, with the figures of the records."""
    speed, perplexity = records()
    negatives = "sampled softmax, 512 negatives and the batch's targets"
    forest = "forest of 4 trees, C = 256, 512 negatives"
    tail = ", all classes in the last tenth"
    every = "forest of 4 trees, C = 256, all classes"
    heads = forest, negatives, "softmax"
    more = every, f"{forest}{tail}", f"{negatives}{tail}"
    short, long = (
        {
            head: cells("transformer-study.md", f"After {steps} steps", head)[1].split()[0]
            for head in shown
        }
        for steps, shown in (("1,600", heads), ("10,000", heads + more))
    )
    share = cells("transformer-study.md", "After 1,600 steps", forest)[3]
    large = (RESULTS / "large-vocabulary.md").read_text(encoding="utf-8")
    classes = re.findall(r"tokens, ([\d,]+) classes", large)[0]
    sampled, *others = (
        cells("large-vocabulary.md", "by training time", head)[1:7]
        for head in (
            negatives,
            "forest of 4 trees, C = 512, 128 negatives",
            "one tree, C = 512, binary below",
        )
    )
    columns = [(own, cell) for other in others for own, cell in zip(sampled, other, strict=True)]
    assert all(float(own) < float(cell) for own, cell in columns if own and cell)
    screened = cells("screened.md", "SmolLM2", "chosen: R = 288, int4, n = 256")
    slower = sorted(
        ratio(contest["contestants"], f"{DEFAULT_TREES}: {ALL}", f"{SOFTMAX}: {ALL}") or 0
        for name, contest in speed["cpu"].items()
        if name.startswith("decoding, ")
    )
    labels = "10,000 labels, one a row"
    equal = _column(labels, "precision@1")
    duration = {head: float(ms) for head, ms in _column(labels, "ms a step").items()}
    part = {6: "a sixth"}[round(duration["linear"] / duration["sampled-2048"])]
    one, several = (_column(f"100,000 labels, {n} a row", "precision@1") for n in ("one", "five"))
    best = max(several["sampled-512"], several["sampled-2048"])
    tied = [
        f"{perplexity[f'{name}-tied-decay-0.1']:.1f}"
        for name in ("forest-sampled", "leaves-4x256", "softmax")
    ]
    return [
        f"{perplexity['forest-decay-0.1']:.1f} if it trains on all classes. Tied to the input "
        f"embedding, the test perplexities are {tied[0]}, {tied[1]} with four trees and {tied[2]} "
        "with a softmax",
        f"takes {share} of the time with a softmax, and perplexities after 1,600 steps are "
        f"{short[forest]} with the forest and {short['softmax']} with the softmax, after 10,000 "
        f"steps {long[forest]} and {long['softmax']}",
        f"also of one over all classes ({long[every]}), and a sampled softmax ({long[negatives]})",
        f"the forest has {long[f'{forest}{tail}']} and the sampled softmax "
        f"{long[f'{negatives}{tail}']}",
        f"at V = {classes} the sampled softmax is ahead of one tree and a forest at equal time",
        f"finds {100 * float(screened[2]):.1f}% of the best words in {screened[4]} of the float32 "
        "product's time",
        f"take {slower[0]:.2f} to {slower[-1]:.2f} times as long",
        f"2,048 negatives have a precision of {equal['sampled-2048']} in {part} of "
        f"the time of a linear layer ({equal['linear']}), four trees built from the features "
        f"{equal['clustered-trees']}; on 100,000, in equal time, {one['sampled-2048']} and one "
        f"tree {one['clustered-tree']}",
        f"the tree has {several['clustered-tree']}, the best of the sampled softmaxes {best}",
    ]


def _column(title: str, column: str) -> dict[str, str]:
    """A column of a table of classification.md, by head."""
    number = cells("classification.md", title, "head").index(column)
    heads = classification.HEADS
    return {head: cells("classification.md", title, head)[number] for head in heads}


def which_head(speed: Record, perplexity: dict[str, float | None]) -> bytes:
    """The times of the table, against the number of classes."""
    figure = new_figure(9, 3.5)
    axes = figure.subplots()
    classes = [size.classes for size in TRAINING_SIZES]
    there = [speed["cpu"][f"training steps, V = {v}"]["contestants"] for v in classes]
    for name, (label, contestant) in ROWS.items():
        shown = f"{label.replace('`', '')}: {perplexity[contestant]:.1f}"
        axes.plot(classes, [ratio(c, name, UNIT) for c in there], "o-", label=shown)
    axes.set(
        xscale="log", yscale="log", xlabel="number of classes", ylabel="time of a step, linear is 1"
    )
    axes.set_xticks(classes, [f"{v:,}" for v in classes], minor=False)
    axes.minorticks_off()
    axes.legend(bbox_to_anchor=(1, 1), fontsize="x-small")
    return picture(figure)


def pages() -> dict[Path, str]:
    """The pages with the figures that are committed."""
    speed, perplexity = records()
    shown = front_table(speed, perplexity)
    filled = {page: replaced(page.read_text(), "summary", shown) for page in PAGES}
    for name, tables in FILLED.items():
        text = (ROOT / name).read_text()
        for mark, make in tables.items():
            text = replaced(text, mark, make())
        filled[ROOT / name] = text
    heads = ROOT / "docs" / "heads.md"
    return filled | {heads: with_head_figures(heads.read_text(), speed)}


def main() -> None:
    for page, text in pages().items():
        page.write_text(text)
    (RESULTS / "which-head.png").write_bytes(which_head(*records()))


if __name__ == "__main__":
    main()
