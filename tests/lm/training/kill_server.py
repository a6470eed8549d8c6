"""Forks a process for every training it is asked for, so that only one has to import torch.

Writes ``ready``, then reads a line from standard input for each, a number of steps and settings in
JSON: begins the run, or resumes it if its folder is there. Writes the line ``forked PID`` when the
process exists, ``training`` after so many steps, and ``ended STATUS`` when it has ended, where
STATUS is negative after a signal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

import hstree.lm.train
from hstree.lm.config import TrainConfig
from hstree.lm.report import Reporter
from hstree.lm.train import resume, train


class Announcer(Reporter):
    """Speaks once, after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        self.steps -= 1
        if self.steps == 0:
            say("training")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def run(config: TrainConfig, reporter: Reporter) -> None:
    assert config.run is not None
    if Path(config.run).exists():
        resume(config.run, reporter)
    else:
        train(config, reporter)


def main() -> None:
    torch.set_num_threads(1)
    # The picture would take longer than the epoch.
    hstree.lm.train.learning_curve = lambda *_: b"a picture"
    say("ready")
    for line in sys.stdin:
        steps, _, settings = line.partition(" ")
        config = TrainConfig(**json.loads(settings))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(config, Announcer(int(steps)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        say(f"forked {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    main()
