"""``hstree experiment jacobian``: what it writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hstree.cli import main

SMALL = ("--features", "6", "--inputs", "4", "--experts", "2", "3", "--seeds", "2")


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "results"
    arguments = [*SMALL, "--gates", "none", "--activation", "tanh", "--output", str(folder)]
    assert main(["experiment", "jacobian", *arguments, "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "mixture, none gates" in captured.out
    pictures = ["jacobian-normalised-singular-values.png", "jacobian-singular-values.png"]
    names = [*pictures, "jacobian.csv", "jacobian.json", "jacobian.md"]
    assert sorted(file.name for file in folder.iterdir()) == names
    data = json.loads((folder / "jacobian.json").read_text())
    assert (data["features"], data["inputs"], data["seeds"]) == (6, 4, 2)
    assert (data["experts"], data["gates"], data["activation"]) == ([2, 3], ["none"], "tanh")
    kinds = [(layer["kind"], layer["experts"]) for layer in data["layers"]]
    assert kinds == [("linear", None), ("dense", None), ("mixture", 2), ("mixture", 3)]
    rows = list(csv.DictReader((folder / "jacobian.csv").read_text().splitlines()))
    assert len(rows) == 4 * 6
    assert [float(row["mean"]) for row in rows[12:18]] == data["layers"][2]["spectrum"]["mean"]
    page = (folder / "jacobian.md").read_text()
    assert page.startswith("# Jacobians of mixtures of experts\n")
    assert all(f"]({name})" in page for name in pictures)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--experts", "0"), "argument --experts: expected at least 1, got 0"),
        (("--experts", "2", "2"), "experts: expected at least one, each once, got [2, 2]"),
        (("--gates", "relu"), "argument --gates: invalid choice: 'relu'"),
        (("--activation", "swish"), "argument --activation: invalid choice: 'swish'"),
        (("--seeds", "-1"), "argument --seeds: expected at least 1, got -1"),
    ],
)
def test_unusable_arguments(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", "jacobian", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_output_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    assert main(["experiment", "jacobian", *SMALL, "--output", str(file)]) == 2
    assert "--output: expected a folder" in capsys.readouterr().err
    assert file.read_text() == "kept"
