"""The tables that benchmarks.table makes from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.registry import CONTESTS
from benchmarks.table import lines, merged, page, ratio, summary


def run(date: str = "2026-01-02") -> dict[str, Any]:
    """One of pytest-benchmark, in which every step takes 2 s and 3 MiB but the first one half."""
    entries: list[dict[str, Any]] = [{"extra_info": {}}]  # of a benchmark that is no contest
    for name, builds in CONTESTS.items():
        contest: dict[str, Any] = {
            of: {"seconds": [1.0 if not place else 2.0] * 2, "parameters": 10**6}
            for place, of in enumerate(builds)
        }
        if name == "precision":
            contest["no seconds"] = {"parameters": 0}
        for of in contest if name == "heads" else ():
            contest[of] |= {"peak_bytes": 3 * 2**20, "visits": 4}
        extra = {
            "instructions": "avx2",
            "device": "cpu",
            "size": "N = 2, D = 3, V = 4",
            "contest": contest,
        }
        entries.append({"extra_info": {"name": name, **extra}})
    machine = {"cpu": {"brand_raw": "a CPU"}}
    return {"benchmarks": entries, "datetime": f"{date}T03:04:05", "machine_info": machine}


def test_ratio_is_the_median_over_rounds_of_the_ratio_within_a_round() -> None:
    contest = {
        "a": {"seconds": [1.0, 30.0, 3.0], "visits": 2},
        "b": {"seconds": [1.0, 10.0, 1.5], "visits": 1},
    }
    assert ratio(contest, "a", "b") == 2.0
    assert ratio(contest, "a", "b", "visit") == 1.0
    assert ratio(contest, "a", "c") is None
    assert ratio(contest, "a", "b", "peak_bytes") is None


def test_every_contest_is_on_the_page() -> None:
    record = summary(run())
    assert json.loads(lines(record)) == record
    assert lines(record).count("\n") == len(record["cpu"]) + 4
    text = page(record)
    assert text.count("\n**") == len(CONTESTS)
    assert "- N = 2, D = 3, V = 4. a CPU, CPU kernels for avx2, torch " in text
    assert "| plif | 2.00 (2,000 ms) | 2.00 | 3 MiB | 1.00 M |" in text
    assert "| hstree train | 2.00 (2,000 ms) | 1.00 M |" in text
    assert "| no seconds | not measured |  |" in text


def test_merged_results_keep_their_sources() -> None:
    old, new = summary(run()), summary(run("2027-01-02"))
    new["cpu"] = {name: one for name, one in new["cpu"].items() if name.startswith("decoding")}
    both = merged(old, new)["cpu"]
    assert both.keys() == old["cpu"].keys()
    assert both["decoding, N = 1"]["measured"].endswith("2027-01-02")
    assert both["trainer"]["measured"].endswith("2026-01-02")


def test_committed_page_is_made_from_the_committed_figures() -> None:
    results = Path(__file__).parent / "results"
    text = (results / "cpu.json").read_text()
    figures = json.loads(text)
    assert text == lines(figures)
    assert (results / "cpu.md").read_text() == page(figures)
