"""Processes that are killed at random moments, also while they save, and resumed."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm.training.runs import assert_same_run, metrics
from lm.training.toy import SGD, small_config, write_corpus
from safetensors import safe_open

from hstree.lm.config import TrainConfig

KILLS = 20

AVERAGED = {
    **SGD,
    "learning_rate": 10.0,
    "averaging": "nt",
    "nonmono": 0,
    "variable_bptt": True,
    "layers": 2,
    "weight_dropout": 0.2,
    "dropout_embedding": 0.1,
    "save_interval": 0.0,
}
SPARSE = {"head": "trees", "sparse": True, "save_interval": 0.005}


class Server:
    """A process that forks one for every training; see kill_server.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kill_server.py"))],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what select does not see must not wait in a buffer
        )
        assert self._line() == "ready"
        self._heard = ""  # a line that status will read

    def close(self) -> None:
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        assert self._process.returncode == 0

    def start(self, config: TrainConfig, steps: int = 1) -> int:
        """Begins or resumes a run in a process of its own, which tells when it has made ``steps``
        steps; returns its id."""
        assert self._process.stdin is not None
        settings = config.to_json().replace("\n", " ")
        self._process.stdin.write(f"{steps} {settings}\n".encode())
        word, _, pid = self._line().partition(" ")
        assert word == "forked"
        return int(pid)

    def wait_for_steps(self, seconds: float | None = None) -> None:
        """Until the process has made its steps or has ended, at most so long."""
        if select.select([self._process.stdout], [], [], seconds)[0]:
            self._heard = self._line()

    def status(self) -> int:
        """Exit status of the process, which has ended or will; minus the signal that killed it."""
        line, self._heard = self._heard or self._line(), ""
        if line == "training":
            line = self._line()
        word, _, status = line.partition(" ")
        assert word == "ended"
        return int(status)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().rstrip("\n")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [AVERAGED, SPARSE], ids=["averaged", "sparse"])
def test_killed_twenty_times(settings: dict[str, Any], server: Server, tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data", sentences=100)
    expected, run = tmp_path / "expected", tmp_path / "run"
    config = small_config(data, expected, **settings, epochs=12, threads=1)
    begin = time.perf_counter()
    server.start(config)
    server.wait_for_steps()
    setup = time.perf_counter() - begin
    assert server.status() == 0
    life = metrics(expected)[-1]["step"] // 12  # steps, so that the run outlives its kills

    config = replace(config, run=str(run))
    generator = random.Random(str(settings))
    kills = 0
    places: set[int] = set()
    while kills < KILLS and not (run / "summary.json").exists():
        if kills % 5 == 0:  # also while the text is read, and while the folder comes to be
            pid = server.start(config)
            server.wait_for_steps(generator.uniform(0, setup))
        else:
            pid = server.start(config, generator.randint(1, life))
            server.wait_for_steps()
            time.sleep(generator.uniform(0, 0.005))  # about a step
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = server.status()
        assert status in (0, -signal.SIGKILL)
        kills += status != 0
        if run.exists():
            places.add(steps_done(run))
    assert kills >= 15
    assert len(places) > 5
    if not (run / "summary.json").exists():
        server.start(config)
        assert server.status() == 0
    assert_same_run(run, expected)
    if settings is AVERAGED:
        assert {record["averaged"] for record in metrics(run)} == {False, True}
    # Neither half a run folder nor the probe whether one can be made.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "expected", "run"]


def steps_done(run: Path) -> int:
    """Where a run would go on."""
    with safe_open(run / "last.safetensors", framework="pt") as file:
        state = json.loads(file.metadata()["hstree.training"])
    return int(state["trainer"]["position"]["step"])
