"""The command line: what it prints, what it leaves, and how it fails."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.cli.support import fails

import hstree
from hstree.__main__ import main
from hstree.heads import head_names
from hstree.heads.functions import Function
from hstree.lm.config import TrainConfig
from hstree.lm.run import load_run, read_epochs

SMALL = [
    *("--embedding-size", "12", "--hidden-size", "16", "--dropout", "0.1"),
    *("--epochs", "2", "--batch-size", "8", "--bptt", "10", "--warmup", "5", "--device", "cpu"),
    *("--learning-rate", "0.01"),
]
TREES = ["--head", "trees", "--n-trees", "2", "--clusters", "4"]


pytestmark = pytest.mark.usefixtures("elsewhere")


# What works


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"hstree {hstree.__version__} (torch ")
    assert f"), CPU kernels for {torch.ops.hstree.cpu_capability()}, " in " ".join(shown.split())
    assert main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert all(command in listing for command in ("train", "evaluate", "generate", "tree"))
    assert '\n  hstree generate RUN --prompt "the value"  text from a trained model\n' in listing
    assert main(["train", "--help"]) == 0
    listing = re.sub(r"(?<=\w)-\n *", "-", capsys.readouterr().out)
    listing = re.sub(r"\s+", " ", listing)
    assert f"output layer; one of {', '.join(head_names())} (default: sampled)" in listing
    for field in dataclasses.fields(TrainConfig):
        assert f"--{field.name.replace('_', '-')}" in listing
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert f"(default: {field.default})" in listing


def test_train_prints_progress_and_summary(
    data: Path, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    arguments = ["train", "--data", str(data), "--head", "softmax", *SMALL, "--schedule", "linear"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert re.search(r"corpus: data\n +1,8\d\d training, ", out)
    assert re.search(r"epoch 1/2  perplexity train +[\d.]+  valid +[\d.]+ ", out)
    assert re.search(r"unigram model +[\d.]+ +[\d.]+\n", out)
    assert re.search(r"flat softmax of the same size +[\d.]+ ms   the head is [\d.]+ times", out)
    (run,) = (elsewhere / "runs").iterdir()
    assert run.name.endswith("-softmax")
    assert f"run folder:      runs/{run.name}" in out
    config = load_run(run).config
    assert (config.schedule, config.epochs, config.head) == ("linear", 2, "softmax")
    assert config.data == str(data.resolve())


TINY = [*SMALL, "--layers", "2", "--context-size", "10", "--epochs", "1"]


def test_trees_of_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(runs / "trees")
    assert main(["tree", "describe", run, "--index", "1", "--word", "cat"]) == 0
    out = capsys.readouterr().out
    loaded = load_run(run)
    assert f"{run}, tree 2 of 2\n" in out
    assert f"{len(loaded.vocabulary)} classes" in out
    code = loaded.model.head.trees[1].code(loaded.vocabulary["cat"])
    assert f"path of 'cat': children {' '.join(map(str, code))}" in out
    assert main(["tree", "draw", run, "--levels", "2"]) == 0
    assert Path("tree.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in Path().iterdir()] == ["tree.png"]


# What fails


def test_bad_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.txt"
    assert "bad.txt: no such file or folder" in fails(capsys, "train", "--data", str(path))
    path.write_bytes(b"good\nb\xe4d\n")
    error = fails(capsys, "train", "--data", str(path))
    assert re.search(r"bad.txt.*byte 0xe4 at offset 6 \(line 2\)", error)
    assert list(Path().iterdir()) == []


def test_run_folder_that_cannot_be(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    command = ["train", "--data", str(data), *SMALL, "--run", str(tmp_path / "file")]
    assert "already exists" in fails(capsys, *command)
    assert (tmp_path / "file").read_text() == "mine"


def test_divergence(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--data", str(data), *SMALL, "--head", "softmax", "--warmup", "0"]
    error = fails(capsys, *command, "--learning-rate", "1e30", "--clip", "0", status=1)
    assert "lower --learning-rate" in error
    (run,) = (elsewhere / "runs").iterdir()
    assert f"the last good state is kept in runs/{run.name}" in error


def test_bad_tree_commands(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run folder" in fails(capsys, "tree", "describe", "absent")
    softmax = str(runs / "softmax")
    assert "head 'softmax' of this run has no trees" in fails(capsys, "tree", "draw", softmax)
    trees = str(runs / "trees")
    assert "--index: expected 0 to 1" in fails(capsys, "tree", "draw", trees, "--index", "2")
    assert "ends in .png" in fails(capsys, "tree", "draw", trees, "--output", "x.pdf")
    assert "no folder" in fails(capsys, "tree", "draw", trees, "--output", "x/y.png")
    assert "'zebra' is not in" in fails(capsys, "tree", "describe", trees, "--word", "zebra")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the following arguments are required: COMMAND (see hstree --help)"),
        ("trian", "did you mean train? (see hstree --help)"),
        ("train --colour red", "unrecognized arguments: --colour red (see hstree train --help)"),
        ("train --lr 0.1", "did you mean --learning-rate? (see hstree train --help)"),
        ("train --epochs x", "--epochs: invalid int value: 'x' (see hstree train --help)"),
        ("train --epochs 0", "hstree: --epochs: expected at least 1, got 0"),
        ("train --schedule cosin", "did you mean cosine? (see hstree train --help)"),
        ("train --head tree", "did you mean trees? (see hstree train --help)"),
        ("train --head-option red", "hstree: --head-option: expected KEY=VALUE, got 'red'"),
        ("analyze rnak", "did you mean rank? (see hstree analyze --help)"),
        ("analyze rank r --colour", "--colour (see hstree analyze rank --help)"),
    ],
)
def test_usage_errors(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in fails(capsys, *command.split())


def test_errors_inside_hstree_are_one_line_too(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AttributeError("a bug")

    monkeypatch.setattr("hstree.lm.cli.load_run", broken)
    error = fails(capsys, "evaluate", str(runs / "softmax"), status=1)
    assert error == "hstree: unexpected AttributeError: a bug (HSTREE_DEBUG=1 shows where)\n"
    monkeypatch.setenv("HSTREE_DEBUG", "1")
    assert main(["evaluate", str(runs / "softmax")]) == 1
    assert "Traceback" in capsys.readouterr().err


# Ctrl-C, on a real process


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hstree", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """Sends Ctrl-C, checks the exit status and that stderr is one line, but for the progress of
    slow work, and returns it."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    *progress, last = error.splitlines(keepends=True)
    assert all(re.search(r"  \d+%  ", line) for line in progress), error
    assert last.startswith("hstree: interrupted")
    return last


def test_interrupt_after_an_epoch_keeps_it(data: Path, elsewhere: Path) -> None:
    arguments = ["train", "--data", str(data), *SMALL, "--head", "softmax", "--epochs", "100000"]
    with start([*arguments, "--run", "run"], elsewhere) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch      3/100000"):
                break
        error = interrupt(process)
    match = re.search(
        r"epoch (\d+) \(validation perplexity ([\d.]+)\) and the last state are kept in run; ",
        error,
    )
    assert match, error
    assert error.endswith("resume with hstree train --resume run\n")
    assert [path.name for path in elsewhere.iterdir()] == ["run"]
    assert not [path for path in (elsewhere / "run").iterdir() if path.name.startswith(".")]
    records = read_epochs(elsewhere / "run")
    best = records[int(match[1]) - 1]
    assert best.best
    assert f"{best.valid_perplexity:.1f}" == match[2]
    assert main(["evaluate", "run"]) == 0


STOPPED: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluate", "{runs}/softmax"),
    "generate": ("generate", "{runs}/softmax"),
    "analyze": ("analyze", "rank", "{runs}/softmax", "--output", "out"),
    "experiment": ("experiment", "jacobian", "--output", "out"),
    "train": ("train", "--data", "{data}", "--run", "run", "--head", "softmax", *SMALL),
}


@pytest.mark.parametrize(
    ("name", "number"), [*((name, signal.SIGTERM) for name in STOPPED), ("generate", signal.SIGINT)]
)
def test_every_command_ends_at_a_signal(
    name: str,
    number: signal.Signals,
    runs: Path,
    data: Path,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the middle of its work, with one line; it leaves nothing half made."""
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    forward = torch.nn.Module.__call__

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if not isinstance(arguments[0], Function):  # a head that is built calls its function
            signal.raise_signal(number)
        return forward(*arguments, **options)

    monkeypatch.setattr(torch.nn.Module, "__call__", interrupted)
    command = [word.format(runs=runs, data=data) for word in STOPPED[name]]
    assert main(command) == 128 + number
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("hstree: interrupted")
    assert "Traceback" not in error
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
    assert [path.name for path in elsewhere.iterdir()] == (["run"] if name == "train" else [])
