"""``hstree analyze correlation``: what it prints and writes, and how it fails."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from hstree.cli import main

RANKS = (100, 120, 150, 210, 330, 9000)
PERPLEXITIES = (66.5, 66.0, 66.25, 65.0, 65.5, 80.0)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with such a file as hstree study writes: the last run is an outlier; one has
    no rank, one diverged."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HSTREE_DEBUG", raising=False)
    lines = ["model,head,c,k,state,test_perplexity,press_rank"]
    lines += [
        f'"gss, c={i}, k=2",gss,{i},2,finished,{perplexity},{rank}'
        for i, (rank, perplexity) in enumerate(zip(RANKS, PERPLEXITIES, strict=True))
    ]
    lines += ["mos,mos,,,finished,60.0,", "gss,gss,8,2,failed,nan,200"]
    path = Path("study.csv")
    path.write_text("\n".join(lines) + "\n")
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that must fail with one line and leave nothing; returns the line."""
    assert main(["analyze", "correlation", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert not Path("correlation").exists()
    return captured.err


def test_rank_against_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "correlation", "study.csv", "--label", "c", "--group", "head"]) == 0
    out = capsys.readouterr().out
    assert "without 1 outliers" not in out
    assert "without 1 outlier" in out
    assert "(Tukey); here 1 of 6" in out
    assert "note: 1 line of study.csv left out: an empty cell" in out
    assert "note: 1 line of study.csv left out: nan or infinity" in out
    folder = Path("correlation")
    data = json.loads((folder / "correlation.json").read_text())
    assert (data["x"], data["y"], data["left_out"]) == ("press_rank", "test_perplexity", 2)
    assert data["all"]["pearson"] == pytest.approx(np.corrcoef(RANKS, PERPLEXITIES)[0, 1])
    inner = np.corrcoef(RANKS[:-1], PERPLEXITIES[:-1])[0, 1]
    assert data["without_outliers"]["pearson"] == pytest.approx(inner)
    rows = list(csv.DictReader((folder / "correlation.csv").read_text().splitlines()))
    assert [float(row["press_rank"]) for row in rows] == list(RANKS)
    assert [row["outlier"] for row in rows] == ["false"] * 5 + ["true"]
    assert [row["label"] for row in rows] == list("012345")
    assert (folder / "correlation.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "correlation.md").read_text()
    assert page.startswith("# Press rank against test perplexity\n")
    assert "![correlation](correlation.png)" in page


def test_other_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Two labels are told apart by name; a group of numbers is a scale."""
    arguments = ["--x", "c", "--label", "c", "--label", "k", "--group", "k", "--output", "other"]
    assert main(["analyze", "correlation", "study.csv", *arguments]) == 0
    rows = list(csv.DictReader(Path("other/correlation.csv").read_text().splitlines()))
    assert [row["label"] for row in rows] == [f"c={i}, k=2" for i in range(6)]
    assert "Correlation of test perplexity with c" in capsys.readouterr().out


def test_unusable_arguments(capsys: pytest.CaptureFixture[str], table: Path) -> None:
    listed = "(model, head, c, k, state, test_perplexity, press_rank)"
    assert fails(capsys, "study.csv", "--x", "rank").endswith(
        f"--x: expected one of the columns of study.csv {listed}, got rank\n"
    )
    assert "--group: expected one of" in fails(capsys, "study.csv", "--group", "size")
    assert "--label size: expected one of" in fails(capsys, "study.csv", "--label", "size")
    message = "study.csv, line 2: expected a number in column state, got 'finished'"
    assert message in fails(capsys, "study.csv", "--y", "state")
    assert "missing.csv" in fails(capsys, "missing.csv")
    message = "study.csv, x = press_rank, y = k: y: expected values that vary, got 7 times 2"
    assert message in fails(capsys, "study.csv", "--y", "k")
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:3]))
    assert "needs at least three points, got 2" in fails(capsys, "study.csv")
