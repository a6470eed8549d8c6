"""Compare two checkouts of hstree: the steps of the contests, and a short training run.

Both must be built in place (``python setup.py build_ext --inplace``). Two processes, one for each
checkout, alternate step by step, so that other load on the machine affects both equally. The result
is the median of the ratios within a round:

    python -m benchmarks.between BEFORE AFTER --contest heads "wide parts" train --rounds 9
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

STEP_SECONDS = 0.2
"""Seconds of a turn: one step, or as many as fit."""

OTHERS = ("torch tree", "F.linear_cross_entropy", "gather", "torch.optim")
"""Skipped steps that are not hstree's; F.linear + F.cross_entropy is kept to show the noise."""
DECODING = "decoding, N = "


class Worker:
    """A process that runs the steps of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--worker"],
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


def compare(before: Worker, after: Worker, names: list[str], rounds: int) -> Iterator[str]:
    """Yield a table row for each step: median and quartiles of time after / time before."""
    for contest in names:
        known = [worker.ask("list", contest) for worker in (before, after)]
        if not all(known):
            raise SystemExit(f"--contest: expected a contest of both checkouts, got {contest!r}")
        for name in (name for name in known[0] if name in known[1]):
            turns: list[tuple[float, float]] = []
            for worker in (before, after):
                worker.ask("build", contest, name)
            for number in range(rounds + 1):
                pair = (before, after) if number % 2 else (after, before)
                seconds = [worker.ask("turn") for worker in pair]
                turns.append((seconds[0], seconds[1]) if number % 2 else (seconds[1], seconds[0]))
            ratios = [new / old for old, new in turns[1:]]  # the first round has cold caches
            low, middle, high = quantiles(ratios, n=4)
            yield f"| {contest}: {name} | {middle:.3f} | {low:.3f} to {high:.3f} |"


def work() -> None:
    """Answer questions from standard input, one on each line, until it ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import torch

    torch.set_num_threads(1)
    step: Callable[[], object] = lambda: None  # noqa: E731
    for line in sys.stdin:
        what, *of = json.loads(line)
        answer: Any = None
        if what == "list":
            answer = _names(*of)
        elif what == "build":
            torch.manual_seed(0)
            step = _build(*of)
        else:
            step()  # warms up, as the caches have the data of the other process
            seconds = []
            while not seconds or sum(seconds) < STEP_SECONDS:
                begin = time.process_time()
                step()
                seconds.append(time.process_time() - begin)
            answer = median(seconds)
        print(json.dumps(answer), file=answers, flush=True)


def _names(contest: str) -> list[str]:
    if contest == "train":
        return ["trees", "softmax"]
    from benchmarks.registry import CONTESTS

    return [name for name in CONTESTS.get(contest, ()) if not name.startswith(OTHERS)]


def _build(contest: str, name: str) -> Callable[[], object]:
    if contest == "train":
        return _training(name)
    from benchmarks.contest import Size
    from benchmarks.registry import CONTESTS

    rows = int(contest.removeprefix(DECODING)) if contest.startswith(DECODING) else 700
    return CONTESTS[contest][name](Size(rows, 400, 10_000, 400), "cpu").step


def _training(head: str) -> Callable[[], object]:
    """One epoch of a small model: 200 steps on synthetic words."""
    import numpy as np

    from hstree.lm.training import TrainConfig, train

    folder = Path(tempfile.mkdtemp())
    random = np.random.default_rng(0)
    words = np.minimum(random.zipf(1.3, 90_000), 2000)
    for split, (begin, end) in {
        "train": (0, 80_000),
        "valid": (80_000, 85_000),
        "test": (85_000, 90_000),
    }.items():
        lines = [" ".join(f"w{w}" for w in line) for line in words[begin:end].reshape(-1, 10)]
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    runs = iter(range(10**6))

    def run() -> None:
        config = TrainConfig(
            data=str(folder),
            run=str(folder / f"run-{next(runs)}"),
            head=head,
            epochs=1,
            embedding_size=64,
            hidden_size=64,
            batch_size=20,
            bptt=20,
            device="cpu",
            threads=1,
        )
        train(config)

    return run


def main() -> None:
    """Print a Markdown table."""
    if sys.argv[1:] == ["--worker"]:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--contest", nargs="+", required=True, help="of benchmarks.registry, train")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error(f"--rounds: expected at least 2, for quartiles, got {arguments.rounds}")
    for checkout in (arguments.before, arguments.after):
        if not (checkout / "benchmarks" / "registry.py").is_file():
            parser.error(f"expected a checkout of hstree, got {checkout}")
    workers = [Worker(checkout) for checkout in (arguments.before, arguments.after)]
    print("| step | time after / time before | quartiles |")
    print("| --- | ---: | ---: |")
    for line in compare(workers[0], workers[1], arguments.contest, arguments.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
