"""Classification with many labels: the tables of examples/classification.py on one page.

python -m benchmarks.classification --output benchmarks/results

Takes about five minutes on an idle machine, with one thread. --scale 0.1 shortens all training.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.pages import page_parser, publish
from hstree.lab.report import Report
from hstree.lm.report import Table

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "classification.py"
HEADS = (
    *("linear", "adaptive", "sampled-512", "sampled-2048"),
    *("trees", "clustered-tree", "clustered-trees"),
)
SECONDS, STEPS = 10.0, 300
NOTES = (
    "[examples/classification.py](../../examples/classification.py): synthetic rows whose labels "
    "follow a power law and form clusters of 100; 200,000 training rows, 2,000 test rows; a "
    "network of two layers below every head, D = 128; `hstree.optim.AdamW`.",
    "`linear`: `nn.Linear` and the cross-entropy; `adaptive`: torch's adaptive softmax; `trees`: "
    "`TreeEnsemble.from_counts(..., sparse=True)`, four Huffman trees; `clustered-tree`, "
    "`clustered-trees`: `from_features`, one tree and four that split the labels by the mean "
    "features of their rows; `sampled-K`: `SampledSoftmax` with K negatives and the labels of the "
    "batch.",
    "Learning rates were chosen among 0.004, 0.01 and 0.02, without trying every combination: "
    "0.004 for trees and `sampled`, 0.01 for `adaptive`, and for `linear` 0.02 at 100,000 labels "
    "and 0.01 at 10,000.",
    "A step is forward, backward and optimizer, in milliseconds of CPU time. Precision at n: the "
    "number of correct labels among the first n, divided by n; recall: divided by the number of "
    "labels of the row.",
)


def compared(title: str, flags: Sequence[str], linear_rate: str) -> tuple[Table, str]:
    """Run the example with these flags for each head; returns its table, and what it says about the
    memory of the process."""
    rows: list[tuple[str, ...]] = []
    for head in HEADS:
        rate = ["--lr", linear_rate] if head == "linear" else []
        command = [sys.executable, str(SCRIPT), *flags, "--heads", head, *rate]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        shown = done.stdout.splitlines()
        print(shown[2], flush=True)
        header, row = (tuple(map(str.strip, line.split("|")[1:-1])) for line in shown[:3:2])
        rows.append(row)
    return Table(title, header, tuple(rows), (False, *[True] * (len(header) - 1))), shown[-1]


def measure(options: argparse.Namespace) -> Report:
    seconds, steps = f"{options.scale * SECONDS:g}", str(round(options.scale * STEPS))
    settings = {
        f"100,000 labels, one a row: {seconds} s of training, 512 rows a step": (
            ["--seconds", seconds],
            "0.02",
        ),
        f"100,000 labels, five a row: {seconds} s of training, 128 rows a step": (
            ["--seconds", seconds, "--labels", "5", "--batch-size", "128"],
            "0.02",
        ),
        f"10,000 labels, one a row: {steps} steps of 512 rows": (
            ["--classes", "10000", "--steps", steps, "--seconds", "1000"],
            "0.01",
        ),
    }
    found = [compared(title, *setting) for title, setting in settings.items()]
    memory = [f"{table.title.partition(':')[0]}: {said}" for table, said in found]
    return Report(
        "Classification with many labels", [table for table, _ in found], (*NOTES, *memory)
    )


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--scale", type=float, default=1.0)
    publish("classification", parser, measure)


if __name__ == "__main__":
    main()
