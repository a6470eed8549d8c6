"""Two processes with half of the streams each make the steps of one process with all of them.

This file is also the program that those processes run: several trainings in one launch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.runs import Recorder, assert_same_run, metrics, tensors
from lm.training.toy import SGD, small_config, write_corpus
from safetensors import safe_open

from hstree.lm.config import ConfigError, TrainConfig
from hstree.lm.run import CheckpointError
from hstree.lm.train import TrainingInterrupted, resume, train

NO_DROPOUT = {"dropout": 0.0, "dropout_input": 0.0, "dropout_hidden": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "sgd": {**SGD, "weight_decay": 1e-3, "alpha": 1.0, "beta": 1.0, "layers": 2},
    "windows": {**SGD, "variable_bptt": True},
    "averaged": {**SGD, "averaging": "et", "averaging_epoch": 1},
    "averaged-nt": {**SGD, "averaging": "nt", "nonmono": 0, "learning_rate": 10.0, "epochs": 4},
    "adamw": {"layers": 2},
    "tied": {**SGD, "tied": True, "context_size": 12},
    "trees": {"head": "trees"},
    "trees-sgd": {**SGD, "head": "trees"},
    "tied-trees": {
        "head": "trees",
        "tied": True,
        "context_size": 12,
    },
    "mos": {**SGD, "head": "mos", "head_option": ("components=3",)},
    "all-classes": {
        "head": "sampled",
        "head_option": ("negatives=8",),
        "all_classes": 1.0,
    },
    "adaptive": {"head": "adaptive", "head_option": ("cutoffs=[4,8]",)},
    "accumulated": {**SGD, "accumulate": 2},
    "one-stream-each": {**SGD, "batch_size": 1, "bptt": 64},
    "more-streams-than-steps": {**SGD, "batch_size": 60, "bptt": 3},
    "parts-without-a-target": {**SGD, "batch_size": 60, "bptt": 3, "accumulate": 15},
}
DISTURBED: dict[str, dict[str, Any]] = {
    "averaged": {
        **CASES["averaged"],
        "averaging_epoch": 2,
        "variable_bptt": True,
        "weight_dropout": 0.2,
        "epochs": 4,
    },
    "trees": {**CASES["trees"], "epochs": 4},
}
CLI: dict[str, Any] = {  # many small steps in an epoch
    "epochs": 4,
    "threads": 1,
    "schedule": "constant",
    "head": "softmax",
    "embedding_size": 12,
    "hidden_size": 16,
    "dropout": 0.1,
    "dropout_input": 0.1,
    "batch_size": 1,
    "bptt": 1,
    "learning_rate": 0.001,
    "device": "cpu",
}


def settings(folder: Path, run: str, processes: int, changes: dict[str, Any]) -> TrainConfig:
    """Settings with as many streams for any number of processes."""
    changes = {"batch_size": 4, "epochs": 2, **changes}
    streams = 2 * changes.pop("batch_size")
    return small_config(
        folder / "data", folder / run, batch_size=streams // processes, threads=1, **changes
    )


# What each of the processes does


class Signalled(Recorder):
    """Sends SIGTERM to its own process at a step: to the first process, which alone is told."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, epoch: int, loss: float, tokens: int) -> None:
        super().step(epoch, loss, tokens)
        if len(self.losses) == self.at:
            signal.raise_signal(signal.SIGTERM)


def run_all(folder: Path) -> dict[str, Any]:
    """All trainings, and what is to be known of them beside their folders."""
    import torch.distributed as dist

    found: dict[str, Any] = {"losses": {}, "steps": [], "errors": []}
    for name, changes in CASES.items():
        recorder = Recorder()
        result = train(settings(folder, f"two-{name}", 2, NO_DROPOUT | changes), recorder)
        found["losses"][name] = recorder.losses
        found.setdefault("valid", {})[name] = [record.valid_loss for record in result.records]
        weights = torch.cat([p.detach().flatten() for p in result.model.parameters()])
        found.setdefault("weights", {})[name] = weights.double().sum().item()
    for name, changes in DISTURBED.items():
        config = settings(folder, f"undisturbed-{name}", 2, changes)
        train(config)
        config = replace(config, run=str(folder / f"disturbed-{name}"))
        for steps in (3, 1, 5, 4):
            recorder = Signalled(steps)
            try:
                if (folder / f"disturbed-{name}").exists():
                    torch.manual_seed(steps)
                    resume(str(config.run), recorder)
                else:
                    train(config, recorder)
            except TrainingInterrupted as interrupt:
                found["steps"].append((steps, len(recorder.losses), str(interrupt.run)))
            dist.barrier()  # the first process writes the state that both read
        resume(str(config.run))
    train(TrainConfig(data=str(folder / "data"), run=str(folder / "undisturbed-cli"), **CLI))
    with suppress(TrainingInterrupted):
        train(settings(folder, "left-by-two", 2, {}), Signalled(2))
    dist.barrier()
    try:
        resume(folder / "left-by-one")
    except (CheckpointError, ConfigError) as error:
        found["errors"].append(str(error))
    found["sparse"] = []
    for changes in ({"head": "trees", "sparse": True}, {"sparse_embedding": True}):
        try:
            train(settings(folder, "sparse", 2, changes))
        except ConfigError as error:
            found["sparse"].append(str(error))

    assert dist.is_initialized()
    return found


def main() -> None:
    import torch.distributed as dist

    import hstree.lm.train

    hstree.lm.train.learning_curve = lambda *_: b""  # it would take the longest
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = run_all(folder)
    (folder / f"found-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    os._exit(0)  # the threads of gloo may outlive the interpreter, and end it with an abort


# Tests


def launch(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """Two processes, started by torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-m", *torchrun, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What a launch still writes; none of its processes lives on."""
    try:
        return process.communicate()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pictures, and one thread, as the processes have that are started here."""
    monkeypatch.setattr("hstree.lm.train.learning_curve", lambda *_: b"")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have left in :func:`run_all`."""
    folder = tmp_path_factory.mktemp("distributed")
    write_corpus(folder / "data", sentences=60)
    with pytest.raises(TrainingInterrupted):
        train(settings(folder, "left-by-one", 1, {}), Signalled(2))
    process = launch([__file__, str(folder)], folder)
    _, error = finish(process)
    assert process.returncode == 0, error
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each of the two processes reports."""
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one_with_the_doubled_batch(
    name: str, folder: Path, found: list[dict[str, Any]]
) -> None:
    recorder = Recorder()
    result = train(settings(folder, f"one-{name}", 1, NO_DROPOUT | CASES[name]), recorder)
    losses = found[0]["losses"][name]
    assert len(losses) == len(recorder.losses)
    assert losses == pytest.approx(recorder.losses, rel=1e-5)
    one, two = metrics(folder / f"one-{name}"), metrics(folder / f"two-{name}")
    for mine, theirs in zip(two, one, strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["averaged"] == theirs["averaged"]
        assert mine["best"] == theirs["best"]
        for key in ("train_loss", "valid_loss", "learning_rate"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5)
    assert two[-1]["valid_loss"] == found[1]["valid"][name][-1]
    assert len(result.records) == len(two)
    # The first process alone is told; both are given the same result.
    assert found[1]["losses"][name] == []
    assert found[0]["weights"][name] == found[1]["weights"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTURBED)
def test_interrupted_and_resumed(name: str, folder: Path) -> None:
    assert_same_run(folder / f"disturbed-{name}", folder / f"undisturbed-{name}")
    states = tensors(folder / f"disturbed-{name}" / "last.safetensors")["training.random.cpu"]
    assert not torch.equal(states[0], states[1])


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_the_same_step(
    folder: Path, found: list[dict[str, Any]]
) -> None:
    assert [steps for steps, _, _ in found[0]["steps"]] == len(DISTURBED) * [3, 1, 5, 4]
    assert all(asked == made for asked, made, _ in found[0]["steps"])
    assert len(found[1]["steps"]) == 4 * len(DISTURBED)


@pytest.mark.slow
def test_another_number_of_processes_is_refused(folder: Path, found: list[dict[str, Any]]) -> None:
    for report in found:
        (message,) = report["errors"]
        assert "1 process" in message
        assert "got 2" in message
    with pytest.raises((CheckpointError, ConfigError), match=r"2 processes.*got 1"):
        resume(folder / "left-by-two")


@pytest.mark.slow
def test_row_sparse_gradients_are_refused(folder: Path, found: list[dict[str, Any]]) -> None:
    for report in found:
        for flag, message in zip(("--sparse", "--sparse-embedding"), report["sparse"], strict=True):
            assert message.startswith(f"{flag}: expected one process, since row-sparse gradients")
            assert message.endswith("got 2")
    assert not (folder / "sparse").exists()


@pytest.mark.slow
def test_torchrun_is_interrupted_and_goes_on(folder: Path) -> None:
    """Ctrl-C in a terminal: all processes receive it, torchrun among them."""
    # Without the two dashes torchrun takes --run for an abbreviation of an option of its own.
    command = ["-m", "--", "hstree", "train"]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in CLI.items()]
    with launch([*command, "--data", "data", "--run", "cli", *flags], folder) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("epoch 1/4"):
                break
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        output, error = finish(process)
    assert process.returncode != 0
    output = "".join(lines) + output
    assert output.count("epoch 1/4  perplexity") == 1  # one process prints
    assert error.count("hstree train --resume cli") == 1, error
    state = training_state(folder / "cli")
    assert 1 <= len(state["records"]) < 4
    assert state["trainer"]["in_epoch"], "the work since the end of the epoch is lost"

    with launch([*command, "--resume", "cli"], folder) as process:
        output, error = finish(process)
    assert process.returncode == 0, error
    assert output.count("epoch 4/4  perplexity") == 1
    assert_same_run(folder / "cli", folder / "undisturbed-cli")


def training_state(run: Path) -> dict[str, Any]:
    """What the state of a run says beside its tensors."""
    with safe_open(run / "last.safetensors", framework="pt") as file:
        state: dict[str, Any] = json.loads(file.metadata()["hstree.training"])
    return state


if __name__ == "__main__":
    main()
