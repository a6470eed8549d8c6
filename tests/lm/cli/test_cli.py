"""The command line: what it prints, what it leaves, and how it fails."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lm.training.toy import QUICK, write_corpus

import hstree
from hstree.__main__ import main
from hstree.heads import head_names
from hstree.heads.functions import Function
from hstree.lm.config import TrainConfig
from hstree.lm.data import Vocabulary
from hstree.lm.run import load_run, read_epochs
from hstree.trees import Tree

SMALL = [
    *(
        "--embedding-size",
        "12",
        "--hidden-size",
        "16",
        "--dropout",
        "0.1",
        "--learning-rate",
        "0.01",
    ),
    *("--epochs", "2", "--batch-size", "8", "--bptt", "10", "--warmup", "5", "--device", "cpu"),
]
TREES = ["--head", "trees", "--n-trees", "2", "--root", "4"]


pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("toy") / "data")


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two finished runs, ``trees`` and ``softmax``."""
    folder = tmp_path_factory.mktemp("runs")
    for head, flags in (("trees", TREES), ("softmax", ["--head", "softmax"])):
        run = str(folder / head)
        assert main(["train", "--data", str(data), "--run", run, *flags, *SMALL]) == 0
    return folder


def fails(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """Runs a command that must fail with one line on stderr; returns the line."""
    assert main(list(arguments)) == status
    error = capsys.readouterr().err
    assert error.endswith("\n")
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    assert error.startswith("hstree")
    return error


# What works


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"hstree {hstree.__version__} (torch ")
    assert main(["--help"]) == 0
    listing = capsys.readouterr().out
    assert all(command in listing for command in ("train", "evaluate", "generate", "tree"))
    assert '\n  hstree generate RUN --prompt "the value"  text from a trained model\n' in listing
    assert main(["train", "--help"]) == 0
    listing = re.sub(r"(?<=\w)-\n *", "-", capsys.readouterr().out)
    listing = re.sub(r"\s+", " ", listing)
    assert f"output layer, one of {', '.join(head_names())} (default: trees)" in listing
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


@pytest.mark.slow
@pytest.mark.parametrize("head", head_names())
def test_every_head_trains_evaluates_and_generates(
    head: str, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [f"--head-option={option}" for option in QUICK.get(head, ())]
    command = ["train", "--data", str(data), "--run", "run", "--head", head, *TINY, *options]
    assert main(command) == 0
    assert f"head '{head}' with" in capsys.readouterr().out
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["head"] == head
    assert summary["valid_perplexity"] < summary["unigram_valid_perplexity"]
    assert main(["evaluate", "run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for split in ("valid", "test"):
        assert result[split]["perplexity"] == summary[f"{split}_perplexity"]
    assert main(["generate", "run", "--prompt", "the", "--words", "5", "--samples", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("the") >= 2
    assert re.fullmatch(r"hstree: [\d,]+ tokens/s\n", captured.err)


def test_tied_model(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--data", str(data), *TINY, "--head", "softmax", "--tied"]
    error = fails(capsys, *command)
    assert error.startswith("hstree: --tied: ")
    assert "make --context-size (now 10) and --embedding-size (now 12) equal" in error
    assert list(elsewhere.iterdir()) == []
    assert main([*command, "--context-size", "12", "--run", "run"]) == 0
    run = load_run("run")
    assert run.config.tied
    assert run.model.head.weight is run.model.backbone.embedding.weight
    error = fails(capsys, *command, "--head", "adaptive")
    assert error == "hstree: --tied: the head 'adaptive' cannot be tied to the word embeddings\n"


def test_train_on_a_text_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "story.txt"
    text.write_text("The cat saw the dog. The dog, too, saw the cat!\n" * 80)
    run = tmp_path / "run"
    arguments = ["train", "--data", str(text), "--run", str(run), "--head", "softmax", *SMALL]
    assert main(arguments) == 0
    assert main(["evaluate", str(run)]) == 0
    assert "story.txt" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["cluster", "huffman", "random"])
def test_tree_build_describe_draw(
    recipe: str, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"tree build words.tree --recipe {recipe} --root 4 --leaf 3 --seed 5 --data".split()
    assert main([*command, str(data)]) == 0
    capsys.readouterr()
    tree = Tree.load("words.tree")
    vocabulary = Vocabulary.load("words.tree.vocabulary.txt")
    assert tree.n_classes == len(vocabulary)
    assert tree.root_width == 4

    assert main(["tree", "describe", "words.tree", "--word", "cat"]) == 0
    out = capsys.readouterr().out
    assert f"{len(vocabulary)} classes" in out
    code = " ".join(map(str, tree.code(vocabulary["cat"])))
    assert f"path of 'cat': children {code}" in out
    assert main(["tree", "draw", "words.tree", "--output", "top.png", "--levels", "2"]) == 0
    assert Path("top.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in elsewhere.iterdir()) == [
        "top.png",
        "words.tree",
        "words.tree.vocabulary.txt",
    ]


def test_tree_build_with_levels(
    data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tree", "build", "words.tree", "--data", str(data), "--root", "4"]
    assert "--levels: invalid choice: 4" in fails(capsys, *command, "--levels", "4")
    error = fails(capsys, *command, "--levels", "2", "--leaf", "3")
    assert "--leaf: expected 1 with --levels 2, got 3" in error
    assert main([*command, "--levels", "2"]) == 0
    tree = Tree.load("words.tree")
    assert (tree.root_width, tree.height) == (4, 2)


def test_tree_from_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "describe", str(runs / "trees"), "--index", "1"]) == 0
    assert "tree 2 of 2" in capsys.readouterr().out
    assert main(["tree", "draw", str(runs / "trees")]) == 0
    assert Path("tree.png").is_file()


# What fails


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in fails(capsys)
    assert "invalid choice: 'trian'" in fails(capsys, "trian")
    assert "unrecognized arguments: --colour" in fails(capsys, "train", "--colour", "red")
    assert "--epochs: invalid int value: 'x'" in fails(capsys, "train", "--epochs", "x")
    assert "--epochs: expected at least 1" in fails(capsys, "train", "--epochs", "0")
    assert "--gate: invalid choice" in fails(capsys, "train", "--gate", "no")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or folder"),
        (b"", "the file is empty"),
        (b"good\nb\xe4d\n", r"byte 0xe4 at offset 6 \(line 2\)"),
        (b"word " * 500, "at least two different words.*only 'word'"),
        (b"a b c\n", "too few to split"),
    ],
    ids=["missing", "empty", "latin-1", "one-word", "short"],
)
def test_bad_texts(
    content: bytes | None,
    message: str,
    tmp_path: Path,
    elsewhere: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        path.write_bytes(content)
    error = fails(capsys, "train", "--data", str(path), *SMALL)
    assert "bad.txt" in error
    assert re.search(message, error)
    assert list(elsewhere.iterdir()) == []


def test_bad_folder(tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_corpus(tmp_path / "data")
    (folder / "valid.txt").unlink()
    assert "missing valid.txt" in fails(capsys, "train", "--data", str(folder))
    (folder / "valid.txt").write_bytes(b"\xff")
    assert "valid.txt: not UTF-8" in fails(capsys, "train", "--data", str(folder))
    assert list(elsewhere.iterdir()) == []


def test_run_folder_that_cannot_be(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    command = ["train", "--data", str(data), *SMALL, "--run"]
    assert "cannot create" in fails(capsys, *command, str(tmp_path / "file" / "run"))
    assert "already exists" in fails(capsys, *command, str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder no one can write to")
def test_run_folder_in_a_place_nobody_can_write(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, "train", "--data", str(data), *SMALL, "--run", "/proc/hstree/run")
    assert "cannot create the run folder /proc/hstree/run" in error


def test_unknown_head_and_options(
    data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--data", str(data), *SMALL, "--head"]
    names = ", ".join(head_names())
    assert f"expected one of {names}, got 'tree'" in fails(capsys, *command, "tree")
    error = fails(capsys, *command, "softmax", "--head-option", "colour=red")
    assert "'softmax' does not accept these options" in error
    assert "KEY=VALUE" in fails(capsys, *command, "softmax", "--head-option", "red")
    assert list(elsewhere.iterdir()) == []


def test_divergence(data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--data", str(data), *SMALL, "--head", "softmax", "--warmup", "0"]
    error = fails(capsys, *command, "--learning-rate", "1e30", "--clip", "0", status=1)
    assert "lower --learning-rate" in error
    (run,) = (elsewhere / "runs").iterdir()
    assert f"the last good state is kept in runs/{run.name}" in error


def test_batch_larger_than_the_corpus(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "train", "--data", str(data), *SMALL, "--batch-size", "99999")
    assert "--batch-size: expected at least 100000 tokens in the train part of data" in error


def test_bad_runs(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("evaluate", "generate"):
        assert "no such run folder" in fails(capsys, command, str(tmp_path / "absent"))
        assert "not a run folder" in fails(capsys, command, str(tmp_path))
    damaged = tmp_path / "damaged"
    shutil.copytree(runs / "softmax", damaged)
    model = damaged / "model.safetensors"
    model.write_bytes(model.read_bytes()[:1000])
    assert "truncated" in fails(capsys, "evaluate", str(damaged))
    (damaged / "config.json").write_text("{")
    assert "config.json" in fails(capsys, "generate", str(damaged))


def test_bad_tree_commands(
    runs: Path, data: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such file" in fails(capsys, "tree", "describe", "absent")
    softmax = str(runs / "softmax")
    assert "head 'softmax' of this run has no trees" in fails(capsys, "tree", "draw", softmax)
    trees = str(runs / "trees")
    assert "--index: expected 0 to 1" in fails(capsys, "tree", "draw", trees, "--index", "2")
    assert "ends in .png" in fails(capsys, "tree", "draw", trees, "--output", "x.pdf")
    assert "no folder" in fails(capsys, "tree", "draw", trees, "--output", "x/y.png")
    assert "'zebra' is not in" in fails(capsys, "tree", "describe", trees, "--word", "zebra")
    Path("words.tree").write_text("mine")
    error = fails(capsys, "tree", "build", "words.tree", "--data", str(data))
    assert "words.tree already exists" in error
    assert "safetensors" in fails(capsys, "tree", "describe", "words.tree")
    assert [path.name for path in elsewhere.iterdir()] == ["words.tree"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "did you mean train? (see hstree --help)"),
        (["train", "--lr", "0.1"], "did you mean --learning-rate? (see hstree train --help)"),
        (["train", "--bs=3"], "did you mean --batch-size? (see hstree train --help)"),
        (["train", "--schedule", "cosin"], "did you mean cosine? (see hstree train --help)"),
        (
            ["evaluate", "run", "--streems", "3"],
            "did you mean --streams? (see hstree evaluate --help",
        ),
        (["analyze", "rnak"], "did you mean rank? (see hstree analyze --help)"),
        (["analyze", "rank", "r", "--colour"], "--colour (see hstree analyze rank --help)"),
        (["tree", "bild"], "did you mean build? (see hstree tree --help)"),
        (["study", "file", "--dry"], ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_may_be_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, *arguments)


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
    match = re.search(r"epoch (\d+) \(validation perplexity ([\d.]+)\) is kept in run; ", error)
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


def test_interrupt_before_an_epoch_keeps_the_state(tmp_path: Path, elsewhere: Path) -> None:
    large = write_corpus(tmp_path / "large", sentences=20_000)
    arguments = ["train", "--data", str(large), *SMALL, "--head", "softmax", "--batch-size", "1"]
    with start([*arguments, "--bptt", "1", "--run", "run"], elsewhere) as process:
        while not (elsewhere / "run").exists() and process.poll() is None:
            time.sleep(0.05)
        error = interrupt(process)
    assert error == (
        "hstree: interrupted before the first epoch ended; resume with hstree train --resume run\n"
    )
    assert (elsewhere / "run" / "last.safetensors").is_file()
