"""The sweep of learning rates at a small size, and its committed page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import learning_rates
from benchmarks.learning_rates import HEADS, best, losses, made_up, page, worse

RESULTS = Path(__file__).parent / "results"


def test_a_row_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning_rates, "FACTORS", [8.0, 1.0])
    states = made_up(8, 3)
    assert states.hidden.square().mean().item() == pytest.approx(1, rel=1e-3)
    row: dict[str, Any] = {"states": states.name, "norm": 90.0}
    row |= {head: losses(states, head) for head in HEADS}
    assert all(row[head].keys() == {8.0, 1.0} for head in HEADS)
    (shown,) = page([row]).tables[0].rows
    assert shown[:2] == ("made up, D = 8", "90.0")
    assert shown[6] == "1.0"


def test_best_and_worse() -> None:
    row = {head: {4.0: 3.0, 1.0: 2.0, 0.25: 2.5} for head in HEADS}
    assert best(row, "trees") == 1.0
    assert worse(row, 3.0) == 1.0
    assert worse(row, 0.9) == 0.0


def test_the_committed_page_has_the_committed_figures() -> None:
    record = json.loads((RESULTS / "learning_rates.json").read_text(encoding="utf-8"))
    rows = [
        row | {head: {float(f): loss for f, loss in row[head].items()} for head in HEADS}
        for row in record
    ]
    text = (RESULTS / "learning_rates.md").read_text(encoding="utf-8")
    for cells in page(rows).tables[0].rows:
        assert f"| {' | '.join(cells)} |" in text
