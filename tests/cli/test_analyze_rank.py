"""``hstree analyze rank``: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from training.toy import small_config, write_corpus

from hstree.analysis import log_prob_rank, model_log_prob
from hstree.cli import main
from hstree.training import load_run, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, ``data``, and two finished runs, ``softmax``, tied, and ``mos``."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_corpus(folder / "data")
    for head in ("softmax", "mos"):
        sizes = {"embedding_size": 6, "context_size": 6, "tied": head == "softmax"}
        train(small_config(data, folder / head, head=head, epochs=1, **sizes))
    return folder


@pytest.fixture(autouse=True)
def elsewhere(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)


def fails(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["analyze", "rank", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def table(folder: str) -> list[dict[str, str]]:
    with (Path(folder) / "rank.csv").open() as file:
        return list(csv.DictReader(file))


def test_runs_and_a_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run("softmax")
    tokens = run.corpus().test
    np.save("own.npy", torch.cat(list(model_log_prob(run.model, tokens).blocks(100))).numpy())
    options = ["softmax", "mos", "--log-prob", "own.npy", "--output", "results"]
    assert main(["analyze", "rank", *options]) == 0
    captured = capsys.readouterr()
    n, v = len(tokens), len(run.vocabulary)
    assert f"softmax: {n:,} x {v} float32, svd, " in captured.err
    assert f"softmax: head softmax, {n:,} contexts of the test part of data; " in captured.out
    assert "a softmax over 6 features with bias has rank at most 8" in captured.out
    assert {path.name for path in Path("results").iterdir()} == {
        "rank.md",
        "rank.json",
        "rank.csv",
        "rank-spectrum.png",
        "rank-energy.png",
        "rank-values.npz",
    }
    rows = table("results")
    assert [row["matrix"] for row in rows] == ["softmax", "mos", "own.npy"]
    expected = log_prob_rank(run.model, tokens)
    assert expected.press_rank == 8
    assert [int(row["press_rank"]) for row in rows[::2]] == [8, 8]
    assert int(rows[1]["press_rank"]) > 8
    assert int(rows[2]["effective_rank_1e-05"]) == expected.effective_ranks[1e-5]
    with np.load("results/rank-values.npz") as values:
        assert values["names"].tolist() == ["softmax", "mos", "own.npy"]
        np.testing.assert_array_equal(values["matrix_0"], expected.singular_values)
    data = json.loads(Path("results/rank.json").read_text())["matrices"]
    assert data[0]["index"] == list(range(1, v + 1))
    np.testing.assert_allclose(data[0]["singular_values"], expected.singular_values, rtol=1e-5)


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rows of the validation text in float64, through QR, with an epsilon of one's
    own."""
    options = "--split valid --rows 7 --dtype float64 --method qr --epsilon 0.1 --max-memory 2"
    assert main(["analyze", "rank", "mos", "--output", "options", *options.split()]) == 0
    assert "mos: 7 x " in capsys.readouterr().err
    run = load_run("mos")
    expected = log_prob_rank(run.model, run.corpus().valid, 7, torch.float64, "svd", (0.1,))
    (row,) = table("options")
    assert (row["rows"], row["dtype"], row["route"]) == ("7", "float64", "qr")
    assert row["press_rank"] == str(expected.press_rank) == "7"
    assert row["effective_rank_0.1"] == str(expected.effective_ranks[0.1])
    assert "effective_rank_0.001" not in row
    assert float(row["s_max"]) == pytest.approx(expected.s_max, rel=1e-12)


def test_gram_says_how_exact_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method", "gram", "--output", "gram"]
    assert main(["analyze", "rank", "softmax", *options]) == 0
    out = capsys.readouterr().out
    note = r"singular values at the Press threshold are exact to \d+\.\d\d% of it; 0 lie as close"
    assert re.search(note, out)
    (row,) = table("gram")
    assert (row["route"], row["press_rank"]) == ("gram", "8")


def test_failures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "RUN: expected at least one run folder or --log-prob" in fails(capsys)
    assert "softmax: expected every run and file once" in fails(capsys, "softmax", "softmax")
    assert "absent: no such run folder" in fails(capsys, "absent")
    message = "softmax, test part: rows: expected 1 to "
    assert message in fails(capsys, "softmax", "--rows", "999999")
    message = "--log-prob absent.npy: expected a .npy file"
    assert message in fails(capsys, "--log-prob", "absent.npy")
    np.savez(tmp_path / "two.npz", a=np.ones(2))
    assert "got an archive" in fails(capsys, "--log-prob", str(tmp_path / "two.npz"))
    (tmp_path / "text.npy").write_text("text")
    assert "expected a .npy file" in fails(capsys, "--log-prob", str(tmp_path / "text.npy"))
    np.save(tmp_path / "flat.npy", np.ones(2))
    assert "two dimensions" in fails(capsys, "--log-prob", str(tmp_path / "flat.npy"))
    assert "--epsilon: expected a number between 0 and 1, got 1" in fails(
        capsys, "softmax", "--epsilon", "1"
    )
    message = "method: gram resolves"
    assert message in fails(capsys, "softmax", "--method", "gram", "--dtype", "float64")
    message = "max_memory: "
    assert message in fails(capsys, "softmax", "--max-memory", "0.0001", "--output", "never")
    assert not Path("never").exists()
