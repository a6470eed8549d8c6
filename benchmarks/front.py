"""The table of README.md, made of the figures in benchmarks/results.

    python -m benchmarks.front

replaces the lines between ``<!-- summary: begin -->`` and ``<!-- summary: end -->``.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.optimizers import TRAINING_SIZES
from benchmarks.table import ratio, sources
from benchmarks.targets import number

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- summary: begin -->", "<!-- summary: end -->"
UNIT = "linear, torch.optim.AdamW"

# Contestants of the training steps, as README calls them, with the runs of benchmarks.ptb.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "softmax"),
    "softmax, torch.optim.AdamW": ("`hstree.Softmax`", "softmax"),
    "adaptive, torch.optim.AdamW": ("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
    "trees, torch.optim.AdamW": ("`hstree.TreeEnsemble`, 4 trees", "trees"),
    "trees, sparse, hstree.optim.AdamW": ("4 trees, `sparse=True`", "trees"),
    "one tree, sparse, hstree.optim.AdamW": ("1 tree, `sparse=True`", "tree"),
}


def front_table(speed: dict[str, Any], perplexity: dict[str, dict[str, float]]) -> str:
    """Time, memory and perplexity of a softmax, the adaptive softmax and trees.

    Args:
        speed: the results of benchmarks.table.
        perplexity: those of benchmarks.ptb by head.
    """
    contests = speed["contests"]["cpu"]
    there = [contests[f"training steps, V = {size.classes}"] for size in TRAINING_SIZES]
    columns = " | ".join(f"V = {size.classes:,}" for size in TRAINING_SIZES)
    last = TRAINING_SIZES[-1]
    lines = [
        f"| output layer | {columns} | memory, V = {last.classes:,} | test perplexity |",
        "| --- |" + " ---: |" * (len(there) + 2),
    ]
    for name, (title, run) in ROWS.items():
        times = [number(ratio(contest["contestants"], name, UNIT)) for contest in there]
        memory = there[-1]["contestants"][name]["peak_bytes"] / 2**20
        test = perplexity[run]["test"]
        lines.append(f"| {title} | {' | '.join(times)} | {memory:,.0f} MiB | {test:.1f} |")
    seconds = (median(contest["contestants"][UNIT]["seconds"]) for contest in there)
    unit = ", ".join(f"{1000 * s:,.0f} ms" for s in seconds)
    lines += [
        "",
        f"Time of a training step of the layer (forward, backward, AdamW) with {last.rows} rows of "
        f"{last.features} features on one core, as a multiple of the first row ({unit}); what the "
        "first step adds to memory, gradients and optimizer state included; test perplexity on "
        "Penn Treebank (V = 10,000) after three epochs of a small LSTM, one seed, not converged. "
        f"{sources(there)}",
    ]
    return "\n".join(lines)


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers.

    Raises:
        ValueError: if the text does not have both markers once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"expected one {BEGIN} and one {END} after it")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def readme() -> str:
    """README.md with the table that the committed figures make."""
    results = ROOT / "benchmarks" / "results"
    table = front_table(
        json.loads((results / "cpu.json").read_text()),
        json.loads((results / "ptb-time.json").read_text()),
    )
    return replaced((ROOT / "README.md").read_text(), table)


def main() -> None:
    (ROOT / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
