"""The tables that benchmarks.table makes from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decoding import BEST_WORD
from benchmarks.heads import FLAT
from benchmarks.plot import plot_growth
from benchmarks.registry import CONTESTS
from benchmarks.table import (
    GROUPS,
    HEAD_TABLES,
    TARGETS,
    Ratio,
    decoding,
    heads,
    lines,
    merged,
    page,
    paths,
    ratio,
    summary,
    targets,
    training,
)


def run(device: str = "cpu") -> dict[str, Any]:
    """One of pytest-benchmark, in which every step takes 2 s and 3 MiB but the flat one half; steps
    have 4 visits, gradients that allow 6 MiB, and an error of a hundredth."""
    entries = []
    for name, builds in CONTESTS.items():
        contest = {
            of: {
                "seconds": [2.0, 2.0],
                "parameters": 10**6,
                "peak_bytes": 3 * 2**20,
                "allowed_bytes": 6 * 2**20,
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
    contest = {"a": {"seconds": [1.0, 30.0, 3.0]}, "b": {"seconds": [1.0, 10.0, 1.5]}}
    assert ratio(contest, "a", "b") == 2.0
    assert ratio(contest, "a", "c") is None
    assert ratio(contest, "a", "b", "peak_bytes") is None


def test_fastest_of_a_group_counts_in_each_round() -> None:
    group = "fastest torch tree, T = 8"
    a, b = GROUPS[group]
    contest = {
        a: {"seconds": [6.0, 2.0], "visits": 2},
        b: {"seconds": [4.0, 8.0], "visits": 1},
        "c": {"seconds": [1.0, 1.0], "visits": 4},
    }
    assert ratio(contest, group, "c") == 3.0
    assert ratio(contest, group, "c", "visit_seconds") == (3 / 0.25 + 1 / 0.25) / 2
    assert ratio(contest, "fastest flat loss", "c") is None


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


def test_targets() -> None:
    (shown,), _ = targets(summary(run()))
    assert [row[:2] for row in shown.rows] == [
        (target.title, target.limit) for target in TARGETS if _names(target.to) & _there(target)
    ]
    reached = {row[0]: row[2] for row in shown.rows}
    assert reached["precision: error of T = 8, bfloat16 / torch tree, T = 8, bfloat16"] == "0.25"
    assert reached["wide: extra memory of TreeEnsemble / allowed"] == "0.50"
    assert reached["wide: fastest flat loss / TreeEnsemble"] == "0.50"


def _names(side: str) -> set[str]:
    return set(GROUPS.get(side, (side,)))


def _there(target: Ratio) -> set[str]:
    made_by_errors = {"torch tree, T = 8, bfloat16"}
    return set(CONTESTS[target.contest]) | made_by_errors


def test_page_leaves_out_what_was_not_measured() -> None:
    results = summary(run())
    whole = page(results, "x.png")
    assert whole.count("\n## ") == 7
    assert "![Time of a row against the number of classes](x.png)" in whole
    for name in HEAD_TABLES:
        del results["cpu"][name]
    assert "## A loss of every head" not in page(results, "x.png")


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
    assert (results / "cpu.md").read_text() == page(figures, "cpu.png")


def test_plot_needs_its_contests(tmp_path: Path) -> None:
    contests = summary(run())["cpu"]
    plot_growth(contests, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected a run with growth, T = 1"):
        plot_growth({}, tmp_path / "none.png")


def test_every_target_compares_what_there_is() -> None:
    for target in TARGETS:
        for side in (target.of, target.to):
            assert _names(side) & _there(target) or "linear_cross_entropy" in side, target
