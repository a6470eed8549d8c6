"""``hstree analyze tree``: what it writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from training.toy import small_config, write_corpus

from hstree.cli import main
from hstree.evaluation import evaluate_stream
from hstree.training import load_run, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, runs ``trees``, ``one-tree`` and ``softmax`` on it, and a
    run ``others`` on another."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data", sentences=100)
    for name, options in (
        ("trees", {"head": "trees", "gate": "context", "leaf": 2}),
        ("one-tree", {"head": "trees", "n_trees": 1, "root": 1}),
        ("softmax", {"head": "softmax"}),
    ):
        train(small_config(data, folder / name, epochs=1, **options))
    other = write_corpus(folder / "other", sentences=60, seed=3)
    train(small_config(other, folder / "others", epochs=1))
    return folder


@pytest.fixture(autouse=True)
def among_the_runs(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["analyze", "tree", *arguments, "--output", "no"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert not Path("no").exists()
    return captured.err


def stream_loss(name: str) -> float:
    run = load_run(name)
    return evaluate_stream(run.model, run.corpus().test)


def test_losses_are_those_of_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    options = ["--against", "softmax", "one-tree", "--word", "cat", "--clusters", "3"]
    assert main(["analyze", "tree", "trees", *options, "--output", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Agreement of pairs of trees" in out
    assert {path.name for path in folder.iterdir()} == {
        "tree.md",
        "tree.json",
        "tree.csv",
        "tree-loss-by-level.png",
        "tree-agreement.png",
        "tree-loss-by-frequency.png",
    }
    data: dict[str, Any] = json.loads((folder / "tree.json").read_text())
    assert data["loss"]["mixture"] == pytest.approx(stream_loss("trees"), rel=1e-5)
    assert set(data["nearest"]) == {"cat"}
    tokens = data["loss"]["tokens"]
    with open(folder / "tree.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("trees", "softmax", "one-tree"):
        bins = data["frequency"][name]
        assert sum(f["tokens"] for f in bins) == tokens
        assert sum(f["loss"] for f in bins) / tokens == pytest.approx(stream_loss(name), rel=1e-5)
        of_run = [r for r in rows if r["run"] == name and r["kind"] == "frequency"]
        assert [float(r["loss"]) for r in of_run] == [f["loss"] for f in bins]
    for t, parts in enumerate(data["loss"]["parts"]):
        of_tree = [float(r["loss"]) for r in rows if r["tree"] == str(t + 1)]
        assert sum(of_tree) / tokens == pytest.approx(sum(parts))


def test_one_tree_and_words_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "tree", "one-tree", "--output", str(tmp_path)]) == 0
    assert "Agreement" not in capsys.readouterr().out
    assert not (tmp_path / "tree-agreement.png").exists()
    data = json.loads((tmp_path / "tree.json").read_text())
    loss = data["loss"]
    assert sum(loss["parts"][0]) == pytest.approx(loss["mixture"]) == loss["uniform"]
    run = load_run("one-tree")
    frequencies = dict(zip(run.vocabulary.words, run.vocabulary.frequencies, strict=True))
    shown = [frequencies[word] for word in data["nearest"]]
    assert shown == sorted(shown, reverse=True)
    assert len(shown) > 2


def test_unusable_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    expected = "softmax: model: expected a head of trees, got the head 'softmax'"
    assert expected in fails(capsys, "softmax")
    assert "--word: 'zebra' is not in the vocabulary" in fails(capsys, "trees", "--word", "zebra")
    others = fails(capsys, "trees", "--against", "softmax", "others")
    assert "--against: expected the words of trees, got others in others" in others
    assert "trees: expected every run and file once, got this one twice" in fails(
        capsys, "trees", "--against", "trees"
    )
    assert "absent: no such run folder" in fails(capsys, "trees", "--against", "absent")
    assert "--clusters: expected at least 1, got 0" in fails(capsys, "trees", "--clusters", "0")
