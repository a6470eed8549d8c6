"""The tables that benchmarks.table makes from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoding import BEST_WORD
from benchmarks.heads import FLAT
from benchmarks.registry import CONTESTS
from benchmarks.table import (
    HEAD_TABLES,
    decoding,
    heads,
    lines,
    merged,
    others,
    page,
    paths,
    ratio,
    summary,
    training,
)


def run(device: str = "cpu") -> dict[str, Any]:
    """One of pytest-benchmark, in which every step takes 2 s and 3 MiB but the flat one half; steps
    have 4 visits, and an error of a hundredth."""
    entries = []
    for name, builds in CONTESTS.items():
        contest = {
            of: {
                "seconds": [2.0, 2.0],
                "parameters": 10**6,
                "peak_bytes": 3 * 2**20,
                "visits": 4,
                "error": 0.01,
            }
            for of in builds
        }
        if name == "precision":
            contest["torch tree, T = 8, bfloat16"] = {"parameters": 0, "error": 0.04}
        if FLAT in contest:
            contest[FLAT] |= {"seconds": [1.0, 1.0], "peak_bytes": 3 * 2**19}
        extra = {"device": device, "size": "N = 2, D = 3, V = 4", "contest": contest}
        entries.append({"extra_info": {"name": name, **extra}})
    return {
        "benchmarks": entries,
        "datetime": "2026-01-02T03:04:05",
        "machine_info": {"cpu": {"brand_raw": "a CPU"}},
    }


def test_ratio_is_the_median_over_rounds_of_the_ratio_within_a_round() -> None:
    contest = {
        "a": {"seconds": [1.0, 30.0, 3.0], "visits": 2},
        "b": {"seconds": [1.0, 10.0, 1.5], "visits": 1},
    }
    assert ratio(contest, "a", "b") == 2.0
    assert ratio(contest, "a", "b", "visit") == 1.0
    assert ratio(contest, "a", "c") is None
    assert ratio(contest, "a", "b", "peak_bytes") is None


def test_table_of_heads() -> None:
    (shown,), notes = heads(summary(run()))
    row = next(row for row in shown.rows if row[0] == "`plif`")
    assert row[2:] == ("2.00", "2.00", "1.00 M")
    assert sum(row[0] == FLAT for row in shown.rows) == 1
    assert "1 = 1 s, 2 MiB. a CPU, " in notes[0]


def test_table_of_paths() -> None:
    (shown,), _ = paths(summary(run()))
    rows = {row[0]: row[1:] for row in shown.rows}
    assert rows[FLAT] == (*["0.50 (1,000 ms)"] * 3, "2 MiB")
    assert rows["hstree, T = 1"] == (*["1.00 (2,000 ms)"] * 3, "3 MiB")
    own_chunks = rows["F.linear_cross_entropy, its own chunks"]
    assert own_chunks[2:] == ("not measured", "3 MiB")


def test_table_of_training_steps() -> None:
    (shown,), _ = training(summary(run()))
    same = "1.00 (2,000 ms)"
    names = CONTESTS["training steps, V = 10000"]
    assert shown.rows == tuple((name, same, same, same, "3 MiB") for name in names)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_of_decoding(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    (shown, screened), (note, _) = decoding(summary(run(device)))
    assert len(screened.rows) == len(BEST_WORD)
    assert shown.title == {"cpu": "One core", "cuda": "One GPU"}[device]
    assert len(shown.rows) == len(CONTESTS["decoding, N = 1"])
    assert {cell for row in shown.rows for cell in row[1:]} == {"1.00 (2,000 ms)"}
    assert {"cpu": "a CPU", "cuda": "a GPU"}[device] in note


def test_other_contests() -> None:
    (shown,), _ = others(summary(run()))
    rows = {row[0]: row[1:] for row in shown.rows}
    same = "1.00 (2,000 ms)"
    assert rows["growth, T = 1: V = 3000"] == (same, "1.00", "3 MiB", "0.01")
    assert rows[f"wide: {FLAT}"][:3] == ("0.50 (1,000 ms)", "0.50", "2 MiB")
    error = ("not measured", "", "", "0.04")
    assert rows["precision: torch tree, T = 8, bfloat16"] == error
    assert not any(name.startswith(("heads", "decoding", "path, V")) for name in rows)


def test_every_contest_is_on_the_page() -> None:
    record = summary(run())
    text = page(record)
    assert text.count("\n## ") == 7
    for name, contest in record["cpu"].items():
        for contestant in contest["contestants"]:
            assert (
                f"| {contestant} |" in text
                or f"{name}: {contestant} |" in text
                or (f"| `{contestant}` |" in text)
            ), (name, contestant)
    for name in HEAD_TABLES:
        del record["cpu"][name]
    assert "## A loss of every head" not in page(record)


def test_merged_results_keep_their_sources() -> None:
    old, new = summary(run()), summary(run() | {"datetime": "2027-01-02T03:04:05"})
    new["cpu"] = {name: one for name, one in new["cpu"].items() if name.startswith("decoding")}
    both = merged(old, new)
    assert both["cpu"].keys() == old["cpu"].keys()
    assert "2027-01-02." in decoding(both)[1][0]
    assert "2026-01-02." in paths(both)[1][0]


def test_record_has_a_line_for_each_contest() -> None:
    record = summary(run())
    assert json.loads(lines(record)) == record
    assert lines(record).count("\n") == len(record["cpu"]) + 4


def test_committed_page_is_made_from_the_committed_figures() -> None:
    results = Path(__file__).parent / "results"
    text = (results / "cpu.json").read_text()
    figures = json.loads(text)
    assert text == lines(figures)
    assert (results / "cpu.md").read_text() == page(figures)
