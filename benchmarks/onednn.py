"""Training steps of heads with float32 products by MKL and by oneDNN, in turns.

python -m benchmarks.onednn
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from benchmarks.contest import Size
from benchmarks.optimizers import TRAINING, TRAINING_SIZES
from benchmarks.pages import in_turns, publish
from hstree import _numerics
from hstree.lab.report import Report, row_table

HEADS = ("linear", "softmax", "forest", "sampled", "forest, sampled", "trees")
"""Steps of benchmarks.optimizers: the first is torch's own, which MKL computes in both columns."""
ROUNDS = 9
NOTES = (
    "A step: forward, backward and optimizer, as in cpu.md. By MKL: with `torch.backends.mkldnn` "
    "switched off.",
    "hstree takes oneDNN where MKL does not use the AVX-512 of the processor, that is where it is "
    "not Intel's; see hstree/_numerics.py.",
)


def run(step: Callable[[], object], by_onednn: bool, _: int) -> None:
    torch._C._set_mkldnn_enabled(by_onednn)
    step()


def lines(sizes: Sequence[Size]) -> Iterator[tuple[str, ...]]:
    was_enabled = torch._C._get_mkldnn_enabled()
    try:
        for size in sizes:
            for name in HEADS:
                step = TRAINING[name](size, "cpu").step
                by = {False: partial(run, step, False), True: partial(run, step, True)}
                mkl, onednn = map(median, in_turns(by, ROUNDS).values())
                shown = f"{1000 * mkl:.1f} ms", f"{1000 * onednn:.1f} ms", f"{onednn / mkl:.2f}"
                yield (name, f"{size.classes:,}", *shown)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


def measure(arguments: argparse.Namespace) -> Report:
    sizes = TRAINING_SIZES
    if arguments.classes:
        sizes = [Size(64, 256, arguments.classes, 256)]
    used = "chosen" if _numerics._beats_mkl() else "not chosen, so that both columns are MKL's"
    table = row_table(
        f"One step, oneDNN {used} on this processor",
        ("step", "V", "by MKL", "by oneDNN", "ratio"),
        lines(sizes),
        None,
        str,
    )
    return Report("Products of float32 by MKL and by oneDNN", [table], NOTES)


def main(argv: Sequence[str] | None = None) -> None:
    publish("onednn", __doc__, measure, argv, classes={"type": int, "metavar": "V"})


if __name__ == "__main__":
    main()
