"""``hstree analyze words``: what it prints and leaves, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from training.toy import small_config, write_corpus

from hstree.analysis import spearman
from hstree.cli import main
from hstree.training import load_run, train

PAIRS = [("Cat", "dog", 9.0), ("eats", "sleeps", 5.5), ("fish", "meat", 7.0), ("town", "old", 1.0)]
UNKNOWN = [("cat", "zebra", 3.0), ("lion", "tiger", 8.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``trees`` and ``softmax``, two sets in ``sets``, and ``vectors.txt``."""
    folder = tmp_path_factory.mktemp("words")
    data = write_corpus(folder / "data")
    for head in ("trees", "softmax"):
        train(small_config(data, folder / head, head=head, epochs=1))
    (folder / "sets").mkdir()
    lines = [f"{first}\t{second}\t{score}\n" for first, second, score in PAIRS + UNKNOWN]
    (folder / "sets" / "EN-TOY-6.txt").write_text("".join(lines))
    (folder / "sets" / "other.csv").write_text("word1,word2,mean\n" + "cat,dog,1\nfish,cat,2\n")
    (folder / "vectors.txt").write_text("cat 1 0\ndog 0.9 0.1\nzebra 0 1\n")
    return folder


def test_words(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    output = tmp_path / "new" / "results"
    command = ["analyze", "words", "softmax", "trees", "--benchmarks", "sets"]
    assert main([*command, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    data = json.loads((output / "words.json").read_text())
    for number, name in enumerate(("softmax", "trees")):
        run = load_run(folder / name)
        weight = run.model.backbone.embedding.weight.detach()
        similarities = [
            float(
                torch.cosine_similarity(
                    weight[run.vocabulary[first.lower()]], weight[run.vocabulary[second]], 0
                )
            )
            for first, second, _ in PAIRS
        ]
        rho, p_value = spearman([score for _, _, score in PAIRS], similarities)
        found = data["correlations"][number]
        assert (found["set"], found["model"]) == ("TOY-6", name)
        assert (found["pairs"], found["missing"]) == (6, 2)
        assert found["rho"] == pytest.approx(rho, abs=1e-12)
        assert found["p_value"] == pytest.approx(p_value, abs=1e-12)
        assert f"{rho:.3f}" in printed
        rhos = [each["rho"] for each in data["correlations"] if each["model"] == name]
        assert data["mean"][name] == pytest.approx(sum(rhos) / 2)
    assert data["correlations"][2]["p_value"] is None  # two pairs
    page = (output / "words.md").read_text()
    assert "| TOY-6 | 6 | 2 |" in page
    assert "![words similarity](words-similarity.png)" in page
    assert (output / "words-similarity.png").read_bytes().startswith(b"\x89PNG")
    with (output / "words.csv").open() as file:
        assert [row["missing"] for row in csv.DictReader(file)] == ["2", "2", "0", "0"]


def test_own_vectors_and_common_pairs(folder: Path, tmp_path: Path) -> None:
    command = ["analyze", "words", str(folder / "softmax"), "--benchmarks", str(folder / "sets")]
    command += ["--embeddings", str(folder / "vectors.txt"), "--output", str(tmp_path)]
    for options, missing in (([], [2, 4, 0, 1]), (["--common"], [5, 5, 1, 1])):
        assert main([*command, *options]) == 0
        data = json.loads((tmp_path / "words.json").read_text())
        assert [found["missing"] for found in data["correlations"]] == missing
        assert list(data["mean"]) == ["softmax", "vectors.txt"]
    alone = ["analyze", "words", *command[3:]]
    assert main(alone) == 0


def test_output_vectors(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--benchmarks", str(folder / "sets"), "--vectors", "output"]
    options += ["--output", str(tmp_path)]
    assert main(["analyze", "words", str(folder / "softmax"), *options]) == 0
    assert "output class vectors" in capsys.readouterr().out
    assert main(["analyze", "words", str(folder / "trees"), *options]) == 2
    assert "its head 'trees' has no vector for each class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--benchmarks sets", "RUN: expected at least one run folder, or --embeddings FILE"),
        ("softmax --benchmarks nowhere", "nowhere: no such file or folder"),
        ("softmax --benchmarks data", "line 2: expected word1 word2 score"),
        ("softmax softmax/ --benchmarks sets", "expected every run and file once, got this one"),
        ("data --benchmarks sets", "not a run folder"),
        ("--embeddings none.txt --benchmarks sets", "none.txt: no such file"),
        ("softmax", "the following arguments are required: --benchmarks"),
        ("softmax --benchmarks sets --output vectors.txt", "--output: expected a folder"),
    ],
)
def test_bad_arguments(
    command: str,
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    assert main(["analyze", "words", *command.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
