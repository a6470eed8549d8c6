"""The figures on the rank of PLIF: the committed ones, and those of a tiny softmax."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plif_rank
from hstree.lm.config import TrainConfig
from hstree.lm.train import train

RESULTS = Path(__file__).parent / "results" / "laboratory"


def test_committed_figures_are_those_of_the_runs() -> None:
    flat, most, ranks = plif_rank.trained(RESULTS / "plif-rank.csv")
    written = json.loads((RESULTS / "plif-rank.json").read_text())
    assert (written["softmax"], written["classes"]) == (flat, most) == (66, 2000)
    by_text = {name: {str(k): rank for k, rank in row.items()} for name, row in ranks.items()}
    assert written["trained"] == by_text


def test_fresh_slopes_bend_less_with_more_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat eats the fish and the dog eats the meat .\n" * 200)
    train(
        TrainConfig(
            data=str(text), run=str(tmp_path / "run"), head="softmax", epochs=1,
            embedding_size=4, hidden_size=4, batch_size=4, device="cpu",
        )
    )  # fmt: skip
    few, many = plif_rank.fresh_slopes(tmp_path / "run", (100, 1_000_000), rows=100)
    assert (few["intervals"], many["intervals"]) == (100, 1_000_000)
    assert 0 < many["deviation"] < few["deviation"] / 5
    monkeypatch.setattr(plif_rank, "LARGER_INTERVALS", (100,))
    monkeypatch.setattr(plif_rank, "LARGER_ROWS", 50)
    found = plif_rank.larger(tmp_path / "run")
    assert (found["features"], found["rows"], found["softmax"]) == (4, 50, 6)
    assert [row["intervals"] for row in found["fresh"]] == [100]
