"""The tables that benchmarks.table makes from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.heads import FLAT
from benchmarks.plot import plot_growth
from benchmarks.registry import CONTESTS
from benchmarks.table import (
    TARGETS,
    TREE_TARGETS,
    decoding_table,
    head_tables,
    merged,
    page,
    path_table,
    ratio,
    summary,
    target_tables,
    training_table,
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
        entries.append({"group": f"{name} ({device})", "extra_info": extra})
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


def test_fastest_of_several_counts_in_each_round() -> None:
    contest = {
        "a": {"seconds": [6.0, 2.0], "visits": 2},
        "b": {"seconds": [4.0, 8.0], "visits": 1},
        "c": {"seconds": [1.0, 1.0], "visits": 4},
    }
    assert ratio(contest, ("a", "b", "missing"), "c") == 3.0
    assert ratio(contest, ("a", "b"), "c", "visit_seconds") == (3 / 0.25 + 1 / 0.25) / 2
    assert ratio(contest, ("missing", "other"), "c") is None


def test_table_of_heads() -> None:
    lines = head_tables(summary(run()))
    row = next(line for line in lines if line.startswith("| `plif` |"))
    assert row.endswith("| 2.00 | 2.00 | 1.00 M |")
    assert lines[-1] == "On a GPU: not measured."
    assert sum(line.startswith(f"| {FLAT} |") for line in lines) == 1


def test_table_of_paths() -> None:
    rows = path_table(summary(run()))
    assert rows[0].count("V = ") == 4  # three sizes, and that of the memory
    assert f"| {FLAT} | 0.50 | 0.50 | 0.50 | 2 MiB |" in rows
    assert "| F.linear_cross_entropy, its own chunks | 1.00 | 1.00 | not measured | 3 MiB |" in rows


def test_table_of_training_steps() -> None:
    rows = training_table(summary(run()))
    names = list(CONTESTS["training steps, V = 10000"])
    same = "1.00 (2,000 ms)"
    assert rows[2 : 2 + len(names)] == [
        f"| {n} | {same} | {same} | {same} | 3 MiB |" for n in names
    ]


def test_table_of_decoding() -> None:
    assert "\n".join(decoding_table(summary(run()))).count("| 1.00 " * 8 + "|") == 6


def test_targets() -> None:
    results = summary(run())
    there = [target for target in TARGETS if target.to in CONTESTS[target.contest]]
    heads = "\n".join(target_tables(results, TARGETS))
    assert all(target.title in heads for target in there)
    trees = target_tables(results, TREE_TARGETS)
    assert all(
        any(line.startswith(f"| {target.title} | {target.limit} |") for line in trees)
        for target in TREE_TARGETS
    )
    error = next(line for line in trees if line.startswith("| error"))
    assert error.endswith("| at most 1 | 0.25 |")
    memory = next(line for line in trees if "peak" in line)
    assert memory.endswith("| at most 1 | 0.50 |")


def test_page_leaves_out_what_was_not_measured() -> None:
    results = summary(run())
    whole = page(results, "x.png")
    assert whole.count("\n## ") == 7
    assert "![Time of a row against the number of classes](x.png)" in whole
    del results["contests"]["cpu"]["heads"], results["contests"]["cpu"]["mixtures"]
    assert "## A loss of every head" not in page(results, "x.png")


def test_merged_results_keep_their_sources() -> None:
    old, new = summary(run()), summary(run() | {"datetime": "2027-01-02T03:04:05"})
    contests = new["contests"]["cpu"]
    new["contests"]["cpu"] = {
        name: contest for name, contest in contests.items() if name.startswith("decoding")
    }
    both = merged(old, new)
    assert both["contests"]["cpu"].keys() == old["contests"]["cpu"].keys()
    assert "2027-01-02." in decoding_table(both)[-1]
    assert "2026-01-02." in path_table(both)[-1]


def test_committed_page_is_made_from_the_committed_figures() -> None:
    results = Path(__file__).parent / "results"
    figures = json.loads((results / "cpu.json").read_text())
    assert (results / "cpu.md").read_text() == page(figures, "cpu.png")


def test_plot_needs_its_contests(tmp_path: Path) -> None:
    contests = summary(run())["contests"]["cpu"]
    plot_growth(contests, tmp_path / "growth.png")
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected a run with growth, T = 1"):
        plot_growth({}, tmp_path / "none.png")


def test_every_target_compares_what_there_is() -> None:
    made_by_errors = {"torch tree, T = 8, bfloat16"}
    for target in [*TARGETS, *TREE_TARGETS]:
        names = {
            name
            for side in (target.of, target.to)
            for name in ((side,) if isinstance(side, str) else side)
            if "linear_cross_entropy" not in name  # not in every release of torch
        }
        assert names - made_by_errors <= set(CONTESTS[target.contest])
