"""The table of README.md and docs/index.md, and the figures in that of docs/heads.md, made of the
figures in benchmarks/results.

    python -m benchmarks.front

replaces the lines between ``<!-- summary: begin -->`` and ``<!-- summary: end -->``, and time,
memory and parameters in the rows of docs/heads.md.
"""

from __future__ import annotations

import json
import re
import textwrap
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.heads import FLAT
from benchmarks.optimizers import TRAINING_SIZES
from benchmarks.table import Record, ratio, sources
from benchmarks.trees_study import CONTENDERS
from hstree.lab.study.records import Records
from hstree.lab.study.results import results
from hstree.lm.table import decimals, markdown, table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / page for page in ("README.md", "docs/index.md")]
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"
UNIT = "linear"

# Contestants of the training steps, as README calls them, with those of benchmarks.trees_study.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "softmax"),
    "softmax": ("`hstree.Softmax`", "softmax"),
    "adaptive": ("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
    "sampled": ("`hstree.SampledSoftmax`", "sampled-in-batch-128"),
    "trees": ("`hstree.TreeEnsemble`, 4 trees", "leaves-4x256"),
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
        "V = 10,000, five epochs of a small LSTM, not converged, mean of three seeds. "
        f"{sources(there)}"
    )
    _, _, shown = markdown([table("", ROWS, columns)]).partition("\n\n")  # no title
    return "\n".join([shown, *textwrap.wrap(note, 120, break_on_hyphens=False)])


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers. Raises ValueError unless it has both once, in
    order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"expected one {BEGIN} and one {END} after it")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


HEAD_ROW = re.compile(
    r"^(\| (?:[^|]*, )?`([\w.-]+)` \| [^|]+ \|)[^|]*\|[^|]*\|[^|]*\|$", re.MULTILINE
)


def with_head_figures(text: str, speed: Record) -> str:
    """The text with the figures of the heads that were timed, in the rows of their table."""
    contests = [speed["cpu"][name]["contestants"] for name in ("heads", "mixtures")]

    def row(match: re.Match[str]) -> str:
        name = FLAT if match[2] == "F.cross_entropy" else match[2]
        contest = next((contest for contest in contests if name in contest), None)
        if contest is None:
            return match[0]
        time, memory = (ratio(contest, name, FLAT, figure) for figure in ("seconds", "peak_bytes"))
        parameters = contest[name]["parameters"] / 1e6
        return f"{match[1]} {time:.2f} | {memory:.2f} | {parameters:.2f} M |"

    return HEAD_ROW.sub(row, text)


def pages() -> dict[Path, str]:
    """The pages with the figures that are committed."""
    folder = ROOT / "benchmarks" / "results"
    study = results(CONTENDERS, Records(folder / "trees-study.json"))
    speed = json.loads((folder / "cpu.json").read_text())
    perplexity = {result.contender.name: result.mean("test") for result in study}
    shown = front_table(speed, perplexity)
    filled = {page: replaced(page.read_text(), shown) for page in PAGES}
    heads = ROOT / "docs" / "heads.md"
    return filled | {heads: with_head_figures(heads.read_text(), speed)}


def main() -> None:
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
