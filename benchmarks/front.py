"""The table of README.md, made of the figures in benchmarks/results.

    python -m benchmarks.front

replaces the lines between ``<!-- summary: begin -->`` and ``<!-- summary: end -->``.
"""

from __future__ import annotations

import json
import textwrap
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.optimizers import TRAINING_SIZES
from benchmarks.table import Record, ratio, sources
from benchmarks.trees_study import CONTENDERS
from hstree.lab.study.records import Records
from hstree.lab.study.results import results
from hstree.lm.table import decimals, markdown, table

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"
UNIT = "linear, torch.optim.AdamW"

# Contestants of the training steps, as README calls them, with those of benchmarks.trees_study.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "softmax"),
    "softmax, torch.optim.AdamW": ("`hstree.Softmax`", "softmax"),
    "adaptive, torch.optim.AdamW": ("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
    "trees, torch.optim.AdamW": ("`hstree.TreeEnsemble`, 4 trees", "leaves-4x256"),
    "trees, sparse, hstree.optim.AdamW": ("4 trees, `sparse=True`", "leaves-4x256"),
    "one tree, sparse, hstree.optim.AdamW": ("1 tree, `sparse=True`", "leaves-1x256"),
}


def front_table(speed: Record, perplexity: dict[str, float]) -> str:
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
        f"row's, whose steps take {unit}. Trees have two levels; with `sparse=True` and more than "
        f"12,000 classes binary nodes over groups of 16, which costs {_cost(perplexity)} in "
        "perplexity. "
        "Memory: what the first step adds to the process, gradients and optimizer state included, "
        "parameters not. Test perplexity: "
        "Penn Treebank, V = 10,000, five epochs of a small LSTM, one seed, not converged. "
        f"{sources(there)}"
    )
    _, _, shown = markdown([table("", ROWS, columns)]).partition("\n\n")  # no title
    return "\n".join([shown, *textwrap.wrap(note, 120, break_on_hyphens=False)])


def _cost(perplexity: dict[str, float]) -> str:
    """Change of the perplexity from two levels to groups below binary nodes."""
    groups, two = perplexity["leaves-4x256-groups"], perplexity["leaves-4x256"]
    return f"{groups / two - 1:.0%}"


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers. Raises ValueError unless it has both once, in
    order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"expected one {BEGIN} and one {END} after it")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def readme() -> str:
    """README.md with the table that the committed figures make."""
    folder = ROOT / "benchmarks" / "results"
    study = results(CONTENDERS, Records(folder / "trees-study.json"))
    shown = front_table(
        json.loads((folder / "cpu.json").read_text()),
        {result.contender.name: result.runs[0]["test"] for result in study},
    )
    return replaced((ROOT / "README.md").read_text(), shown)


def main() -> None:
    (ROOT / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
