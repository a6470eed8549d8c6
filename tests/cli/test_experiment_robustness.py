"""``hstree experiment robustness``: what it writes, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hstree.cli import main


def test_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = "--size 60 --rank 4 --repetitions 2 --c 1e-30 --c 1e-5 --seed 3"
    assert main(["experiment", "robustness", *options.split()]) == 0
    out = capsys.readouterr().out
    assert "matrices of 60 x 60, rank 4, seed 3" in out
    assert {path.name for path in Path("robustness").iterdir()} == {
        "robustness.md",
        "robustness.json",
        "robustness.csv",
        "robustness-noise.png",
    }
    data = json.loads(Path("robustness/robustness.json").read_text())
    assert [result["press_ranks"] for result in data["reconstructions"]] == [[4, 4, 4]] * 4
    assert [result["pruned_every_time"] for result in data["reconstructions"]] == [1, 1, 0, 0]
    assert [point["c"] for point in data["noise"]] == [1e-30, 1e-5] * 2
    assert [point["press_rank"] for point in data["noise"]] == [4, 60, 4, 60]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--size 8", "--rank: expected a number below --size, 8, got 10"),
        ("--c -1", "--c: expected a number of at least 0, got -1"),
        ("--repetitions 0", "--repetitions: expected at least 1, got 0"),
    ],
)
def test_failures(
    options: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["experiment", "robustness", *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
