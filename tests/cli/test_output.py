"""What the commands print: no line is wider than a terminal of 80 columns, and ``hstree train``
ends with what to try next."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training.toy import write_corpus

from hstree.cli import main
from hstree.cli.app import build_parser

SMALL = [
    *("--data", "toy", "--embedding-size", "12", "--hidden-size", "16", "--epochs", "2"),
    *("--batch-size", "8", "--bptt", "10", "--learning-rate", "0.01", "--warmup", "5"),
    *("--device", "cpu"),
]
TREES = ["--n-trees", "2", "--root", "4"]
STUDY = 'seeds = [1, 2]\n[settings]\ndata = "toy"\n[[models]]\nhead = "gss"\n'


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from parsers(child)


def assert_narrow(text: str, columns: int = 80) -> None:
    assert text
    assert [line for line in text.splitlines() if len(line.rstrip()) > columns] == []


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus ``toy`` and the runs ``runs/long-name-of-a-run-N``."""
    folder = tmp_path_factory.mktemp("output")
    write_corpus(folder / "toy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for seed in ("1", "2"):
            run = ["--run", f"runs/long-name-of-a-run-{seed}", "--seed", seed]
            assert main(["train", *SMALL, *TREES, *run]) == 0
    (folder / "grid.toml").write_text(STUDY)
    return folder


def test_every_help_text_fits() -> None:
    every = list(parsers(build_parser()))
    assert len(every) > 20
    for parser in every:
        assert_narrow(parser.format_help())


def test_train_ends_with_figures_and_commands_that_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run, with the command that the first one suggests, shows both heads."""
    monkeypatch.chdir(folder)
    assert main(["train", *SMALL, *TREES, "--run", "tried/trees", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert_narrow(captured.out)
    assert captured.err == ""
    out = captured.out
    assert re.search(r"^head trees +[\d.]+ +[\d.]+ +\d+$", out, re.M)
    assert re.search(r"^unigram model +[\d.]+ +[\d.]+$", out, re.M)
    assert re.search(r"^learning curve: +tried/trees/learning_curve.png$", out, re.M)
    assert Path("tried/trees/learning_curve.png").is_file()
    generate, train, analyze = commands(out)
    assert train[:4] == ["hstree", "train", "--head", "softmax"]
    assert main([*train[1:], "--run", "tried/softmax"]) == 0
    captured = capsys.readouterr()
    assert_narrow(captured.out)
    assert re.search(
        r"^head trees, same settings +[\d.]+ +[\d.]+ +\d+   x \d+\.\d$", captured.out, re.M
    )
    _, compare, _ = commands(captured.out)
    for command in (generate, analyze, compare):
        assert main(command[1:]) == 0
        assert_narrow(capsys.readouterr().out)
    assert Path("curves.png").is_file()


def commands(out: str) -> list[list[str]]:
    """The commands that ``hstree train`` suggests, as a shell reads them."""
    suggested = out.split("Next:\n")[1].replace("\\\n", "")
    return [shlex.split(line) for line in suggested.splitlines() if line.startswith("    hstree ")]


RUNS = "runs/long-name-of-a-run-1 runs/long-name-of-a-run-2"


PRINTS = [
    "--version",
    "evaluate runs/long-name-of-a-run-1 --cache --dynamic --dynamic-rule sgd",
    "generate runs/long-name-of-a-run-1 --prompt unheard-of",
    f"compare {RUNS} --plot curves.png",
    "tree describe runs/long-name-of-a-run-1",
    "tree draw runs/long-name-of-a-run-1",
    f"analyze rank {RUNS}",
    "analyze tree runs/long-name-of-a-run-1",
    f"analyze predictions {RUNS} --context the",
    "experiment robustness --size 20 --repetitions 2",
    "study grid.toml --dry-run",
]
FAILS = [
    "train --preset ptb",
    "train --run runs/long-name-of-a-run-1",
    "train --data toy --head-option colour=red --head trees --run new",
    "evaluate runs",
    "tree draw runs/long-name-of-a-run-1 --index 7",
]


@pytest.mark.parametrize(
    ("command", "status"), [*((c, 0) for c in PRINTS), *((c, 2) for c in FAILS)]
)
def test_output_fits(
    command: str,
    status: int,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) == status
    captured = capsys.readouterr()
    assert_narrow(captured.out + captured.err)
    assert "\x1b" not in captured.out + captured.err


def test_a_table_that_does_not_fit_goes_on_below(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["compare", *RUNS.split()]) == 0
        out = capsys.readouterr().out
        assert_narrow(out, columns)
        assert out.count("tokens/s") == 1
        parts = out.count("runs/long-name-of-a-run-1")
        assert parts == 1 if columns == 200 else parts > 1


def test_a_pipe_has_no_control_sequences(folder: Path) -> None:
    """Of a real process; without a terminal tables have their full width."""
    command = [sys.executable, "-m", "hstree.cli", "compare", *RUNS.split()]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    assert "\x1b" not in run.stdout + run.stderr
    assert run.stderr == ""
