"""Large-vocabulary classification: the tables of examples/classification.py on one page.

    python -m benchmarks.classification --save benchmarks/results/classification.md

About six minutes; one thread. With less time, --scale 0.1 shortens all training.
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

from benchmarks.ptb import cpu_name

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "classification.py"
SECONDS, STEPS = 12.0, 300


def table(*flags: str) -> list[str]:
    """The example's output with these flags."""
    print(" ".join(["python examples/classification.py", *flags]), flush=True)
    command = [sys.executable, SCRIPT, *flags]
    shown = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    print(shown, flush=True)
    return shown.splitlines()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    options = parser.parse_args(arguments)
    seconds, steps = f"{options.scale * SECONDS:g}", str(round(options.scale * STEPS))
    one = table("--seconds", seconds)
    five = table("--seconds", seconds, "--labels", "5", "--batch-size", "128")
    equal = table("--classes", "10000", "--steps", steps, "--seconds", "1000")
    page = "\n".join([
        "# Classification with many labels",
        "",
        "[examples/classification.py](../../examples/classification.py): made-up rows whose labels "
        "follow a power law and lie in clusters of 100; 200,000",
        "rows to train on, 2,000 to test; a network of two layers below every head, D = 128, AdamW "
        "at a rate of 0.004. `linear`: `nn.Linear` and the",
        "cross-entropy; `adaptive`: torch's adaptive softmax; `trees`: "
        "`TreeEnsemble.from_counts(..., sparse=True)`, four Huffman trees;",
        "`clustered-tree`, `clustered-trees`: one tree and four that part the labels by the mean "
        "features of their rows. A step is forward, backward and",
        "optimiser, in milliseconds of CPU time; the peak is that of the process. Precision at n: "
        "the share of right ones among the first n labels,",
        "of those that could be right.",
        "",
        f"## 100,000 labels, one a row: {seconds} s of training, 512 rows a step",
        "",
        *one,
        "",
        f"## 100,000 labels, five a row: {seconds} s of training, 128 rows a step",
        "",
        *five,
        "",
        f"## 10,000 labels, one a row: {steps} steps, 512 rows a step",
        "",
        *equal,
        "",
        "    python -m benchmarks.classification --save benchmarks/results/classification.md",
        "",
        f"{cpu_name()}, one thread, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {date.today()}.",
        "",
    ])  # fmt: skip
    if options.save:
        options.save.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
