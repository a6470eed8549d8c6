"""Forks a process for every training it is asked for, so that only one has to import torch.

Writes ``ready``, then reads a line of JSON from standard input for each, its settings: begins the
run, or resumes it if its folder is there. Writes the line ``forked PID`` when the process exists,
``training`` after its first step, and ``ended STATUS`` when it has ended, where STATUS is negative
after a signal.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

import hstree.lm.training.session
from hstree.lm.runs import TrainConfig
from hstree.lm.training import Reporter, resume, train


class Announcer(Reporter):
    """Speaks once the first step, which sets up much in a new process, has been made."""

    def __init__(self) -> None:
        self.silent = True

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        if self.silent:
            say("training")
        self.silent = False


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def run(config: TrainConfig) -> None:
    assert config.run is not None
    if Path(config.run).exists():
        resume(config.run, Announcer())
    else:
        train(config, Announcer())


def main() -> None:
    torch.set_num_threads(1)
    # The picture would take longer than the epoch.
    hstree.lm.training.session.learning_curve = lambda *_: b"a picture"
    say("ready")
    for line in sys.stdin:
        config = TrainConfig.from_json(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(config)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        say(f"forked {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    main()
