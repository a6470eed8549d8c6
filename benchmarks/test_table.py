"""What benchmarks.table makes of a run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.heads import CONTESTS, FLAT
from benchmarks.table import TARGETS, ratio, replace, summary, tables


def run(device: str = "cpu") -> dict[str, Any]:
    """One of pytest-benchmark, in which every step takes 2 s and 3 MiB but the flat one half."""
    entries = []
    for name, builds in CONTESTS.items():
        contest = {
            of: {"seconds": [2.0, 2.0], "parameters": 10**6, "peak_bytes": 3 * 2**20}
            for of in builds
        }
        if FLAT in contest:
            contest[FLAT] |= {"seconds": [1.0, 1.0], "peak_bytes": 3 * 2**19}
        extra = {"device": device, "size": "N = 2", "contest": contest}
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


def test_tables_of_heads_and_targets() -> None:
    made = tables(summary(run()))
    assert set(made) == {"heads", "targets"}
    row = next(line for line in made["heads"].splitlines() if line.startswith("| `plif` |"))
    assert row.endswith("| 2.00 | 2.00 | 1.00 M |")
    assert "On a GPU: not measured." in made["heads"]
    assert made["heads"].count(f"| {FLAT} |") == 1
    there = [target for target in TARGETS if target.to in CONTESTS[target.contest]]
    assert all(target.title in made["targets"] for target in there)


def test_every_target_compares_what_there_is() -> None:
    for target in TARGETS:
        optional = {name for name in (target.of, target.to) if "linear_cross_entropy" in name}
        assert {target.of, target.to} - optional <= set(CONTESTS[target.contest])


def test_replace_keeps_the_rest() -> None:
    text = "a\n<!-- heads: begin -->\nold\n<!-- heads: end -->\nb\n"
    once = replace(text, {"heads": "new"})
    assert once == "a\n<!-- heads: begin -->\nnew\n<!-- heads: end -->\nb\n"
    assert replace(once, {"heads": "new"}) == once


@pytest.mark.parametrize(
    "text", ["", "<!-- heads: begin -->", "<!-- heads: end --><!-- heads: begin -->"]
)
def test_replace_names_missing_markers(text: str) -> None:
    with pytest.raises(ValueError, match="expected one <!-- heads: begin -->"):
        replace(text, {"heads": "new"})
