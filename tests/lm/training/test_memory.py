"""A training whose memory does not suffice, or runs out at a step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.runs import assert_same_run
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree._memory import ran_out
from hstree.lm.model import AWDLSTM
from hstree.lm.run import STATE, load_model, load_run, load_state
from hstree.lm.train import TrainingMemoryError, resume, train

TESTS = Path(__file__).resolve().parents[2]
# Steps that allocate megabytes.
SIZES = {"hidden_size": 256, "batch_size": 16, "bptt": 30, "save_interval": 0.0, "epochs": 3}
STOP = """
import resource, sys
from pathlib import Path
import torch
from hstree.lm.report import Reporter
from hstree.lm.train import TrainingMemoryError, train
from ops.limited import limit
from lm.training.toy import small_config

class Starve(Reporter):
    steps = 0
    def step(self, epoch, loss, tokens):
        self.steps += 1
        if self.steps == 3:
            limit(1 << 20)

torch.set_num_threads(1)
data, run = map(Path, sys.argv[1:])
try:
    train(small_config(data, run, **{sizes}), Starve())
except TrainingMemoryError as error:
    limit(None)
    print(error)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data", sentences=200)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_runs_out_keeps_the_run(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real limit in a process of its own; where there is memory again, the run goes on."""
    run = tmp_path / "run"
    result = subprocess.run(
        [sys.executable, "-c", STOP.replace("{sizes}", repr(SIZES)), str(data), str(run)],
        capture_output=True, text=True, check=False, cwd=TESTS,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("memory ran out; a run with a smaller --batch-size")
    assert f"resume with hstree train --resume {run}" in result.stdout
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    resume(run)
    load_run(run)
    train(small_config(data, tmp_path / "expected", **SIZES))
    torch.set_num_threads(threads)
    assert_same_run(run, tmp_path / "expected")


def test_a_command_says_that_memory_ran_out(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_config(data, tmp_path / "run", epochs=1))

    def exhaust(*_: object, **__: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr("hstree.lm.cli.evaluate", exhaust)
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert re.match(r"hstree: memory ran out: .*allocat", capsys.readouterr().err)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 2, "hidden_size": 2**20},
        {"head": "mos", "head_option": (f"components={10**15}",)},
        {"head": "mos", "head_option": (f"components={10**17}",)},  # more than 64 bits can count
        {"head": "mixtape", "head_option": (f"gate_features={10**15}",)},
    ],
    ids=str,
)
def test_models_beyond_memory_name_their_sizes(
    changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        TrainingMemoryError,
        match=r"^memory ran out; a model with smaller --embedding-size, .*--head-option, needs "
        "less; nothing was written$",
    ):
        train(small_config(data, tmp_path / "large", **changes))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("hstree: not enough memory for an operator"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), True),
        (RuntimeError("the loss became nan"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_errors_of_memory(error: BaseException, expected: bool) -> None:
    assert ran_out(error) == expected


def test_a_file_without_the_memory_for_it_is_not_called_damaged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(small_config(data, tmp_path / "run", epochs=1)).run

    def exhaust(*_: object, **__: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(AWDLSTM, "from_config", exhaust)
    for call in (lambda: load_model(run / "model.safetensors"), lambda: load_state(run / STATE)):
        with pytest.raises(RuntimeError, match="allocat") as caught:
            call()
        assert ran_out(caught.value)
