"""Turns of steps, and commands that make a page of their own, as reports of hstree.lab."""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch

from hstree._files import write_together
from hstree.lab.report import Report

Key = TypeVar("Key")


WIKITEXT: dict[str, Any] = {
    "type": Path,
    "required": True,
    "metavar": "FOLDER",
    "help": "WikiText-2: valid.txt, test.txt",
}
"""Settings of a flag ``--data``."""
AVX2 = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS",
        "HSTREE_CPU_CAPABILITY")  # fmt: skip
"""Variables that choose the instruction set of torch's libraries and of hstree. All with AVX2:
ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
HSTREE_CPU_CAPABILITY=avx2."""
OUTPUT = {"type": Path, "metavar": "FOLDER", "help": "folder for the page and its figures"}


def publish(
    name: str,
    doc: str | None,
    measure: Callable[[argparse.Namespace], Report],
    argv: Sequence[str] | None = None,
    **flags: Mapping[str, Any],
) -> None:
    """Run benchmarks.NAME, with its docstring, on one thread: print its page, NAME.md, and write
    its files to the folder of ``--output``, if there is one. ``flags``: the others, by name. With
    another instruction set than AVX-512 the files begin with NAME-SET, as in screened-avx2.md, and
    the page shows the variables that chose it."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, settings in {**flags, "output": OUTPUT}.items():
        parser.add_argument(f"--{flag}", **settings)
    given = sys.argv[1:] if argv is None else list(argv)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    report = measure(options)
    chosen = [f"{variable}={os.environ[variable]}" for variable in AVX2 if variable in os.environ]
    command = shlex.join([*chosen, "python", "-m", f"benchmarks.{name}", *given])
    capability = torch.ops.hstree.cpu_capability()
    stem = name if capability == "avx512" else f"{name}-{capability}"
    files = report.content(stem, command)
    page = files[f"{stem}.md"]
    assert isinstance(page, bytes)
    print(page.decode())
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_together(options.output, files)


def in_turns(steps: Mapping[Key, Callable[[int], object]], rounds: int) -> dict[Key, list[float]]:
    """Processor seconds of each step in each round, which other processes change little. In a round
    all take turns, in random order, so that each comes after all others; the first round does not
    count, as caches are cold. Steps get the number of the round, 0 for that one."""
    seconds: dict[Key, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        order = list(steps)
        random.Random(turn).shuffle(order)
        for name in order:
            begin = time.process_time()
            steps[name](turn)
            seconds[name].append(time.process_time() - begin)
    return {name: own[1:] for name, own in seconds.items()}


def ratios(seconds: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Median over the rounds of each step's time over that of the first one."""
    unit = next(iter(seconds.values()))
    return {
        name: median(a / b for a, b in zip(own, unit, strict=True)) for name, own in seconds.items()
    }
