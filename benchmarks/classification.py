"""Classification with many labels: the tables of examples/classification.py on one page.

    python -m benchmarks.classification --save benchmarks/results/classification.md

Takes about five minutes on an idle machine, with one thread. --scale 0.1 shortens all training.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from hstree.lab.report import processor as cpu_name

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "classification.py"
HEADS = ("linear", "adaptive", "trees", "clustered-tree", "clustered-trees")
SECONDS, STEPS = 10.0, 300

INTRODUCTION = """\
# Classification with many labels

[examples/classification.py](../../examples/classification.py): synthetic rows whose labels follow a
power law and form clusters of 100; 200,000 training rows, 2,000 test rows; a network of two layers
below every head, D = 128; `hstree.optim.AdamW`. `linear`: `nn.Linear` and the cross-entropy;
`adaptive`: torch's adaptive softmax; `trees`: `TreeEnsemble.from_counts(..., sparse=True)`, four
Huffman trees; `clustered-tree`, `clustered-trees`: one tree and four that split the labels by the
mean features of their rows. Learning rates were chosen among 0.004, 0.01 and 0.02, without trying
every combination: 0.004 for trees, 0.01 for `adaptive`, and for `linear` 0.02 at 100,000 labels and
0.01 at 10,000.

A step is forward, backward and optimizer, in milliseconds of CPU time. Precision at n: the number
of correct labels among the first n, as a share of the largest possible number. The peak is that of
the process, of which torch and the data take {before}.
"""


def table(flags: Sequence[str], linear_rate: str) -> tuple[list[str], str]:
    """Run the example with these flags for each head; returns its rows, and the memory used by
    torch and data."""
    lines: list[str] = []
    for head in HEADS:
        rate = ["--lr", linear_rate] if head == "linear" else []
        command = [sys.executable, str(SCRIPT), *flags, "--heads", head, *rate]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        shown = done.stdout.splitlines()
        lines += shown[2:3] if lines else shown[:3]
        print(lines[-1], flush=True)
    return lines, shown[-1].removeprefix("Of the peak, torch and the data take ").rstrip(".")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args(arguments)
    scale = "" if options.scale == 1 else f" --scale {options.scale:g}"
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
    parts, memory = [], []
    for title, setting in settings.items():
        lines, before = table(*setting)
        memory.append(before)
        parts += [f"## {title}", "", *lines, ""]
    page = "\n".join([
        INTRODUCTION.format(before=", ".join(memory[:-1]) + f" and {memory[-1]}"),
        *parts,
        f"    python -m benchmarks.classification{scale} "
        "--save benchmarks/results/classification.md",
        "",
        f"{cpu_name()}, one thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date.today()}.",
        "",
    ])  # fmt: skip
    print(page)
    if options.save:
        options.save.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
