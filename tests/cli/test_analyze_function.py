"""``hstree analyze function``: what it writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from training.toy import small_config, write_corpus

from hstree.cli import main
from hstree.training import load_run, train

HEADS = ("plif", "softmax", "trees")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, and a run of each head."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data", sentences=100)
    for head in HEADS:
        train(small_config(data, folder / head, head=head, epochs=1))
    return folder


@pytest.fixture(autouse=True)
def among_the_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["analyze", "function", *arguments, "--output", "no"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert not Path("no").exists()
    return captured.err


def test_page_picture_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"
    command = ["analyze", "function", "softmax", "plif", "--output", str(folder)]
    monkeypatch.setattr("sys.argv", ["hstree", *command])
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "Function f of the logits" in out
    assert {path.name for path in folder.iterdir()} == {
        "function.md",
        "function.json",
        "function.csv",
        "function-of-the-logits.png",
    }
    page = (folder / "function.md").read_text()
    assert "![function of the logits](function-of-the-logits.png)" in page
    assert "hstree analyze function softmax plif" in page
    data = json.loads((folder / "function.json").read_text())
    contexts = len(load_run("plif").corpus().test) - 1
    classes = len(load_run("plif").vocabulary)
    for name in ("softmax", "plif"):
        assert sum(data[name]["logits"]["counts"]) == contexts * classes
        assert sum(data[name]["next_logits"]["counts"]) == contexts
    assert data["plif"]["options"]["intervals"] == 1000
    assert data["plif"]["slopes"]["pieces of f"]["mean"] == pytest.approx(1.1, abs=0.2)
    with open(folder / "function.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"softmax", "plif"}
    assert all(
        float(row["value"]) == float(row["logit"]) for row in rows if row["run"] == "softmax"
    )


def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "trees: model: expected a head that is a softmax"
    assert expected in fails(capsys, "softmax", "trees")
    assert "plif: expected every run and file once, got this one twice" in fails(
        capsys, "plif", "plif"
    )
    assert "absent: no such run folder" in fails(capsys, "absent")
    assert "no such" in fails(capsys, "plif", "--data", "nowhere")
    assert main(["analyze", "function", "plif", "--output", "plif/config.json"]) == 2
    assert "--output: expected a folder" in capsys.readouterr().err
