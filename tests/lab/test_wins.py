"""Hits and pairwise wins: against a count token by token, ties, tables, picture, command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from heads.support import V as N_CLASSES
from heads.support import make
from lm.training.toy import small_config, write_corpus

from hstree.__main__ import main
from hstree.heads import Softmax
from hstree.lab import PairwiseWins, pairwise_wins
from hstree.lab.wins.report import wins_picture, wins_rows, wins_tables
from hstree.lm.models import LanguageModel
from hstree.lm.runs import load_run
from hstree.lm.training import train
from lab.commands import csv_rows, refused
from lab.toy_models import all_contexts, toy_model, toy_text

KINDS = ("softmax", "mos", "trees")


def counted(models: dict[str, LanguageModel], text: np.ndarray) -> PairwiseWins:
    """The definition, token by token."""
    n = len(text) - 1
    hits, wins = (np.zeros((len(models),) * 2, np.int64) for _ in range(2))
    probabilities = []
    for model in models.values():
        hidden, _ = all_contexts(model, text)
        probabilities.append(model.head.log_prob(hidden).detach().numpy())
    for t, word in enumerate(text[1:]):
        for i, one in enumerate(probabilities):
            right = one[t].argmax() == word
            hits[i, i] += right
            for j, other in enumerate(probabilities):
                if i != j:
                    hits[i, j] += right and other[t].argmax() != word
                    wins[i, j] += one[t, word] > other[t, word]
    return PairwiseWins(tuple(models), n, hits, wins)


def test_counts() -> None:
    models = {kind: toy_model(make(kind), seed) for seed, kind in enumerate(KINDS)}
    text = toy_text(N_CLASSES)
    models["mos"].train()
    found = pairwise_wins(models, text.astype(np.int32))
    assert models["mos"].training
    models["mos"].eval()
    expected = counted(models, text)
    assert (found.models, found.tokens) == (KINDS, len(text) - 1)
    np.testing.assert_array_equal(found.hits, expected.hits)
    np.testing.assert_array_equal(found.wins, expected.wins)
    assert found.hits.dtype == found.wins.dtype == np.int64
    assert (found.hits.diagonal() > 0).all()
    # What both predict, counted from either side.
    both = found.hits.diagonal()[:, None] - found.hits
    np.fill_diagonal(both, 0)
    np.testing.assert_array_equal(both, both.T)
    off = ~np.eye(3, dtype=bool)
    assert (found.wins + found.wins.T)[off].tolist() == [found.tokens] * 6  # no ties


def test_ties() -> None:
    """Equal models win nothing from each other; of equally probable classes the first counts."""
    model = toy_model(make("softmax"))
    flat = toy_model(make("softmax"))
    assert isinstance(flat.head, Softmax)
    assert flat.head.bias is not None
    for parameter in flat.head.parameters():
        torch.nn.init.zeros_(parameter)
    text = toy_text(N_CLASSES)
    found = pairwise_wins({"a": model, "b": model, "flat": flat}, text)
    assert found.wins[:2, :2].tolist() == [[0, 0], [0, 0]]
    assert found.hits[0, 1] == found.hits[1, 0] == 0
    assert found.hits[0, 0] == found.hits[1, 1]
    assert found.hits[2, 2] == (text[1:] == 0).sum()
    assert (found.wins.diagonal() == 0).all()


def test_unusable_arguments() -> None:
    model = toy_model(make("softmax"))
    other = toy_model(Softmax(10, N_CLASSES + 1))
    text = toy_text(N_CLASSES)
    with pytest.raises(ValueError, match="models: expected at least two, got 1"):
        pairwise_wins({"a": model}, text)
    message = rf"one vocabulary, but a has {N_CLASSES} classes and b {N_CLASSES + 1}"
    with pytest.raises(ValueError, match=message):
        pairwise_wins({"a": model, "b": other}, text)
    with pytest.raises(ValueError, match="tokens: expected at least 2, got 1"):
        pairwise_wins({"a": model, "b": model}, text[:1])
    with pytest.raises(ValueError, match="tokens: expected at least one integer in one dimension"):
        pairwise_wins({"a": model, "b": model}, text.astype(float))


FOUND = PairwiseWins(
    ("one", "two", "$x"),
    400,
    np.array([[100, 8, 100], [12, 104, 104], [0, 0, 0]]),
    np.array([[0, 300, 1], [90, 0, 2], [399, 398, 0]]),
)


def test_tables_and_rows() -> None:
    hits, wins = wins_tables(FOUND)
    assert hits.header == wins.header == ("model", "one", "two", "$x")
    assert hits.rows[0] == ("one", "25.00", "2.00", "25.00")
    assert hits.rows[1] == ("two", "3.00", "26.00", "26.00")
    assert wins.rows[0] == ("one", "-", "75.00", "0.25")
    assert wins.rows[2] == ("$x", "99.75", "99.50", "-")
    assert FOUND.wins[0, 0] == 0  # the tables have their own copy
    rows = wins_rows(FOUND)
    assert len(rows) == 9
    assert rows[1] == {"first": "one", "second": "two", "tokens": 400, "hits": 8, "wins": 300}
    assert rows[4] == {"first": "two", "second": "two", "tokens": 400, "hits": 104, "wins": 0}


def test_picture() -> None:
    first, second, *_ = wins_picture(FOUND).axes
    assert [text.get_text() for text in first.texts[:4]] == ["25.0", "2.0", "25.0", "3.0"]
    assert [text.get_text() for text in second.texts[:3]] == ["-", "75.0", "0.2"]
    assert first.get_yticklabels()[2].get_text() == r"\$x"
    image = second.images[0]
    assert image.norm.vmin + image.norm.vmax == pytest.approx(100)
    np.testing.assert_allclose(image.get_array()[0, 1], 75.0)
    assert np.ma.is_masked(image.get_array()[1, 1]) or np.isnan(image.get_array()[1, 1])
    many = 13  # too many for numbers
    counts = np.ones((many, many), np.int64)
    crowded = PairwiseWins(tuple(map(str, range(many))), 4, counts, counts)
    assert [len(axes.texts) for axes in wins_picture(crowded).axes[:2]] == [0, 0]


def test_titles_of_long_names_are_beside_the_color_bars() -> None:
    names = tuple(f"mos-components={k}-seed={s}" for k in (1, 20) for s in (1, 2))
    counts = np.arange(16).reshape(4, 4)
    figure = wins_picture(PairwiseWins(names, 100, counts, counts))
    figure.canvas.draw()
    first, second, *bars = figure.axes
    for axes, bar in ((first, bars[0]), (second, bars[1])):
        title = axes.title.get_window_extent()
        assert title.x1 < bar.get_window_extent().x0
        assert title.x0 > 0


# The command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``softmax`` and ``gss`` on the text ``data``, ``narrow`` with fewer words, and
    ``renamed`` on a text with another word in place of one."""
    folder = tmp_path_factory.mktemp("wins")
    data = write_corpus(folder / "data", sentences=60)
    for head in ("softmax", "gss"):
        train(small_config(data, folder / head, head=head, epochs=1))
    train(small_config(data, folder / "narrow", max_vocabulary=9, epochs=1))
    (folder / "other").mkdir()
    for part in ("train", "valid", "test"):
        lines = (data / f"{part}.txt").read_text().replace("mats", "rugs")
        (folder / "other" / f"{part}.txt").write_text(lines)
    train(small_config(folder / "other", folder / "renamed", epochs=1))
    return folder


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("split", ["test", "valid"])
def test_command(split: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--split", split, "--output", str(tmp_path)]
    assert main(["analyze", "wins", "softmax", "gss", *output]) == 0
    printed = capsys.readouterr().out
    runs = {name: load_run(name) for name in ("softmax", "gss")}
    text = getattr(runs["gss"].corpus(), split)
    expected = counted({name: run.model for name, run in runs.items()}, text)
    data = json.loads((tmp_path / "wins.json").read_text())
    assert data["hits"] == expected.hits.tolist()
    assert data["wins"] == expected.wins.tolist()
    found = csv_rows(tmp_path / "wins.csv")
    rows = [(row["first"], row["second"], int(row["wins"])) for row in found]
    assert rows[1] == ("softmax", "gss", expected.wins[0, 1])
    assert f"{100 * expected.wins[0, 1] / expected.tokens:.2f}" in printed
    assert f"note: {expected.tokens:,} tokens of the {split} part of data" in printed
    assert (tmp_path / "wins.png").read_bytes().startswith(b"\x89PNG")
    assert "![wins](wins.png)" in (tmp_path / "wins.md").read_text()


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["softmax"], "RUN: expected at least two runs, got softmax alone"),
        (["softmax", "./softmax"], "expected every run and file once"),
        (["softmax", "narrow"], "words, and narrow has one with 9 words"),
        (["softmax", "renamed"], "one of the same size with other words or in another order"),
        (["softmax", "gss", "--data", "nowhere"], "nowhere: no such file or folder"),
    ],
)
def test_bad_arguments(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = str(tmp_path / "output")
    error = refused(capsys, "analyze", "wins", *options, "--output", output, left=output)
    assert message in error


@pytest.mark.usefixtures("inside")
def test_runs_on_different_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_corpus(tmp_path / "data", sentences=60)
    train(small_config(data, tmp_path / "shorter", epochs=1))
    test = data / "test.txt"
    test.write_text("".join(test.read_text().splitlines(keepends=True)[:5]))
    runs = ["softmax", str(tmp_path / "shorter")]
    output = ["--output", str(tmp_path / "output")]
    assert main(["analyze", "wins", *runs, *output]) == 2
    assert "the test parts of softmax and shorter differ" in capsys.readouterr().err
    assert main(["analyze", "wins", *runs, *output, "--data", "data"]) == 0
