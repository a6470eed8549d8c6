"""``hstree experiment synthetic``: what it prints, what it writes, how it fails and ends."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from hstree.cli import main

TINY = ["--contexts", "10", "--outcomes", "5", "--dimensions", "2", "4", "--steps", "3"]
TINY += ["--processes", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)


def test_page_pictures_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--alpha", "0.1", "1", "--heads", "softmax", "mos:components=2", "--seeds", "1"]
    assert main(["experiment", "synthetic", *TINY, *flags, "--output", "out/here"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Mode matching (% of contexts), alpha = 0.1" in " ".join(captured.out.split())
    folder = Path("out/here")
    assert sorted(path.name for path in folder.iterdir()) == [
        "synthetic-alpha-0.1.png",
        "synthetic-alpha-1.png",
        "synthetic.csv",
        "synthetic.json",
        "synthetic.md",
    ]
    with (folder / "synthetic.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["alpha"], row["head"], row["dimension"]) for row in rows] == [
        (alpha, head, dimension)
        for alpha in ("0.1", "1.0")
        for head in ("softmax", "mos:components=2")
        for dimension in ("2", "4")
    ]
    data = json.loads((folder / "synthetic.json").read_text())
    assert data["fits"][0]["divergence"] == float(rows[0]["divergence"])
    assert len(data["search"]) == 3 * len(rows)
    assert "| mos:components=2 |" in (folder / "synthetic.md").read_text()


def test_all_heads(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--alpha", "1", "--heads", "all", "--seeds", "1", "--learning-rates", "0.1"]
    assert main(["experiment", "synthetic", *TINY, *flags]) == 0
    out = capsys.readouterr().out
    assert all(f"\n {head} " in out for head in ("adaptive", "mixtape", "trees-wide"))
    assert "doc" not in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heads", "softmx"), "heads: expected one of adaptive"),
        (("--heads", "doc"), "heads: 'doc' reads several layers"),
        (("--dimensions", "2", "2"), "dimensions: expected different ones"),
        (("--processes", "0"), "--processes: expected at least 1"),
        (("--outcomes", "1"), "outcomes: expected at least 2"),
        (("--alpha", "0"), "--alpha: expected a positive number"),
        (("--contexts", "none"), "--contexts: invalid"),
        (("--output", "file"), "--output: expected a folder"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    Path("file").touch()
    assert main(["experiment", "synthetic", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not Path("results").exists()


def test_interruption_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hstree.experiments.synthetic.fit_head", interrupt)
    assert main(["experiment", "synthetic", *TINY]) == 130
    assert not list(Path("results").iterdir())
    assert "Traceback" not in capsys.readouterr().err


def test_progress_is_told_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    flags = ["--heads", "softmax", "--alpha", "1", "--seeds", "1"]
    assert main(["experiment", "synthetic", *TINY, *flags]) == 0
    captured = capsys.readouterr()
    assert "Mode matching" in captured.out
    assert "softmax" in captured.err
