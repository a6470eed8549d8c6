"""Compare the steps of the contests in two checkouts of hstree.

Both must be built in place (``python setup.py build_ext --inplace``). Two processes, one for each
checkout, alternate step by step, so that other load on the machine affects both equally. The result
is the median of the ratios within a round:

    python -m benchmarks.between BEFORE AFTER --contest heads "wide parts" --rounds 9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hstree.lm.report import markdown, number, table

STEP_SECONDS = 0.2
"""Seconds of a turn: one step, or as many as fit."""
OTHERS = ("torch tree", "F.linear_cross_entropy", "gather", "torch.optim")
"""Skipped steps that are not hstree's; F.linear + F.cross_entropy is kept to show the noise."""


class Worker:
    """A process that runs the steps of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.between", "--worker"],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *question: str) -> Any:
        """Ask :func:`work` a question and return its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process ended with status {self.process.wait()}")
        return json.loads(answer)


def compare(
    before: Worker, after: Worker, names: Sequence[str], rounds: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield each step with the quartiles of time after / time before."""
    for contest in names:
        known = [worker.ask("list", contest) for worker in (before, after)]
        if not all(known):
            raise SystemExit(f"--contest: expected a contest of both checkouts, got {contest!r}")
        for name in (name for name in known[0] if name in known[1]):
            ratios = []
            for worker in (before, after):
                worker.ask("build", contest, name)
            for turn in range(rounds + 1):
                order = (before, after) if turn % 2 else (after, before)
                seconds = {worker: worker.ask("turn") for worker in order}
                ratios.append(seconds[after] / seconds[before])
            yield f"{contest}: {name}", quantiles(ratios[1:], n=4)  # the first has cold caches


def work() -> None:
    """Answer questions from standard input, one on each line, until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    from benchmarks.contest import Size
    from benchmarks.registry import CONTESTS

    torch.set_num_threads(1)
    step: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        what, *of = json.loads(line)
        answer: Any = None
        if what == "list":
            answer = [name for name in CONTESTS.get(of[0], ()) if not name.startswith(OTHERS)]
        elif what == "build":
            torch.manual_seed(0)
            step = CONTESTS[of[0]][of[1]](Size(700, 400, 10_000, 400), "cpu").step
        else:
            step()  # warms up, as the caches have the data of the other process
            seconds: list[float] = []
            while sum(seconds) < STEP_SECONDS:
                begin = time.process_time()
                step()
                seconds.append(time.process_time() - begin)
            answer = median(seconds)
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Print a Markdown table."""
    if sys.argv[1:] == ["--worker"]:
        work()
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--contest", nargs="+", required=True, help="of benchmarks.registry")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds: expected at least 2, for quartiles, got {arguments.rounds}")
    checkouts = (arguments.before, arguments.after)
    for checkout in checkouts:
        if not (checkout / "benchmarks" / "registry.py").is_file():
            parser.error(f"expected a checkout of hstree, got {checkout}")
    before, after = map(Worker, checkouts)
    rows = compare(before, after, arguments.contest, arguments.rounds)
    three = number(".3f")
    columns: list[Any] = [
        ("step", lambda row: row[0]),
        ("median", lambda row: row[1][1], three),
        ("quartiles", lambda row: f"{three(row[1][0])} to {three(row[1][2])}", str),
    ]
    print(markdown([table("Time after / time before", rows, columns)]))


if __name__ == "__main__":
    main()
