"""What the commands print: no line is wider than a terminal of 80 columns, and ``hstree train``
ends with what to try next."""

from __future__ import annotations

import argparse
import io
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from lm.training.toy import write_corpus

from hstree.__main__ import COMMANDS, DESCRIPTION, main
from hstree.lm.cli import build_parser

SMALL = [
    *("--data", "toy", "--embedding-size", "12", "--hidden-size", "16", "--epochs", "2"),
    *("--batch-size", "8", "--bptt", "10", "--learning-rate", "0.01", "--warmup", "5"),
    *("--device", "cpu"),
]
TREES = ["--head", "trees", "--n-trees", "2", "--clusters", "4"]
STUDY = """\
seeds = [1, 2]
rank = true
[settings]
data = "toy"
embedding_size = 8
hidden_size = 8
epochs = 1
device = "cpu"
[[models]]
head = "gss"
"""


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
        assert main(["train", *SMALL, "--head", "softmax", "--run", "runs/softmax"]) == 0
    (folder / "grid.toml").write_text(STUDY)
    pairs = ("cat\tdog", "the\told", "runs\teats", "fish\tmeat", "on\tto")
    lines = [f"{pair}\t{score}\n" for score, pair in enumerate(pairs)]
    (folder / "similar.txt").write_text("".join(lines))
    points = [f"{name},{40 + k / 3},{k}" for name in ("mos", "gss") for k in range(1, 4)]
    (folder / "points.csv").write_text("\n".join(["model,test_perplexity,press_rank", *points]))
    return folder


@pytest.mark.parametrize("columns", ["80", "40"])
def test_every_help_text_fits(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 40 columns options are folded; descriptions with examples keep their lines of up to 80."""
    monkeypatch.setenv("COLUMNS", columns)
    every = list(parsers(build_parser(COMMANDS, DESCRIPTION)))
    assert len(every) > 18
    for parser in every:
        assert_narrow(parser.format_help())


def test_train_ends_with_figures_and_commands_that_run(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run, with the command that the first one suggests, shows both heads."""
    monkeypatch.chdir(folder)
    tied = ["--tied", "--context-size", "12"]
    assert main(["train", *SMALL, *TREES, *tied, "--run", "tried/trees", "--seed", "3"]) == 0
    captured = capsys.readouterr()
    assert_narrow(captured.out)
    assert captured.err == ""
    out = captured.out
    assert re.search(r"^head trees +[\d.]+ +[\d.]+ +\d+$", out, re.M)
    assert re.search(r"^unigram model +[\d.]+ +[\d.]+$", out, re.M)
    assert re.search(r"^learning curve: +tried/trees/learning_curve.png$", out, re.M)
    assert Path("tried/trees/learning_curve.png").is_file()
    generate, train, analyze = commands(out)
    assert train[2:6] == ["--config", "tried/trees/config.json", "--head", "softmax"]
    assert train[6:] == ["--run", "tried/trees-softmax"]
    assert main(train[1:]) == 0
    captured = capsys.readouterr()
    assert_narrow(captured.out)
    assert re.search(
        r"^head trees, same settings +[\d.]+ +[\d.]+ +\d+   x \d+\.\d$", captured.out, re.M
    )
    assert not Path("tried/trees/comparison.png").exists()
    assert "\nbeside trees:    tried/trees-softmax/comparison.png\n" in captured.out
    assert Path("tried/trees-softmax/comparison.png").read_bytes().startswith(b"\x89PNG\r\n")
    _, compare, _ = commands(captured.out)
    for command in (generate, analyze, compare):
        assert main(command[1:]) == 0
        assert_narrow(capsys.readouterr().out)


def commands(out: str) -> list[list[str]]:
    """The commands that ``hstree train`` suggests, as a shell reads them."""
    suggested = out.split("Next:\n")[1].replace("\\\n", "")
    return [shlex.split(line) for line in suggested.splitlines() if line.startswith("    hstree ")]


RUNS = "runs/long-name-of-a-run-1 runs/long-name-of-a-run-2"


FAILS = [
    "train --preset ptb",
    "train --run runs/long-name-of-a-run-1",
    "train --data toy --head-option colour=red --head trees --run new",
    "tree draw runs/long-name-of-a-run-1 --index 7",
]


@pytest.mark.parametrize("command", FAILS)
def test_errors_fit(
    command: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(shlex.split(command)) == 2
    captured = capsys.readouterr()
    assert_narrow(captured.out + captured.err)


# The tables and lines of these fit 40 columns, where a word longer than a line stays whole; the
# others are laid out for 80.
NARROW = [
    "--version",
    f"compare {RUNS}",
    "tree draw runs/long-name-of-a-run-1",
    f"analyze rank {RUNS}",
    "analyze tree runs/long-name-of-a-run-1",
    f"analyze predictions {RUNS} --context the",
    f"analyze words {RUNS} --benchmarks similar.txt",
    "analyze function runs/softmax",
    "analyze correlation points.csv --x press_rank --y test_perplexity",
    "analyze significance --table points.csv",
    "experiment robustness --size 20 --repetitions 2",
    "experiment jacobian --features 6 --inputs 4 --experts 2 --seeds 1",
    "study grid.toml --dry-run",
    "study grid.toml",
]
WIDE = [
    "evaluate runs/long-name-of-a-run-1",
    "generate runs/long-name-of-a-run-1 --prompt unheard-of --words 4",
    "tree describe runs/long-name-of-a-run-1",
]


@pytest.mark.parametrize("command", [*NARROW, *WIDE])
def test_forty_columns(
    command: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "40")
    output = ["--output", str(tmp_path / "o")] if command.startswith(("an", "exp")) else []
    assert main([*shlex.split(command), *output]) == 0
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert "\x1b" not in text
    assert_narrow(text)
    if command in NARROW:
        wide = [line for line in text.splitlines() if len(line.rstrip()) > 40]
        assert [line for line in wide if len(line.split()) > 1 and "/" not in line] == []


def test_a_table_that_does_not_fit_goes_on_below(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(["compare", *RUNS.split()]) == 0
        out = capsys.readouterr().out
        assert_narrow(out, columns)
        assert out.count("tokens") == 1
        parts = out.count("runs/long-name-of-a-run-1")
        assert parts == 1 if columns == 200 else parts > 1


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("generate {run} --prompt œuvre --words 2", r"\u0153uvre"),
        ("evaluate {run} --data œuvre", r"on \u0153uvre"),
        ("compare {run} œuvre/run", r"\u0153uvre/run"),
        ("train --data nœud", r"n\u0153ud: no such file or folder"),
    ],
)
def test_a_terminal_without_the_character(
    command: str,
    shown: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is shown as an escape; no command ends there."""
    run = folder / "runs" / "softmax"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder / "toy", "œuvre")
    shutil.copytree(run, "œuvre/run")
    both = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", both)
    monkeypatch.setattr(sys, "stderr", both)
    status = main([word.format(run=run) for word in command.split()])
    both.flush()
    text = both.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert shown in text
    assert status == (2 if "nœud" in command else 0)


ODD = "\x1b[31m\x9b2J\u202e\x07"


@pytest.mark.parametrize(
    "command",
    [
        "generate {run} --words 40 --temperature 1000",
        "analyze predictions {run} --context the --top-k 16 --output out",
        "evaluate {run}" + ODD,
    ],
)
def test_nothing_moves_the_cursor(
    command: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Words and names with escape sequences are shown as escapes."""
    run = tmp_path / "run"
    shutil.copytree(folder / "runs" / "long-name-of-a-run-1", run)
    file = run / "vocabulary.txt"
    lines = file.read_text().splitlines()
    plain = [line for line in lines if line.startswith(("<", "the"))]
    odd = [f"{ODD}{line}" for line in lines if line not in plain]
    file.write_text("\n".join([*plain, *odd]) + "\n")
    monkeypatch.chdir(folder)
    main([word.format(run=run) for word in shlex.split(command)])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert [c for c in text if unicodedata.category(c) == "Cc" and c not in "\n\t"] == []
    assert "\u202e" not in text
    assert "\\x1b" in text
