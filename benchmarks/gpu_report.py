"""Tables of the results of benchmarks.gpu_proof in results.json.

python -m benchmarks.gpu_report build/proof/results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.gpu import CONTESTANTS, EAGER, SETTINGS
from hstree.lm.report import Table, decimals, markdown, table

Entry = Mapping[str, Any]

TARGETS = (
    "Targets of binary trees: time of a step / copy of its compulsory bytes at most 2, fastest "
    "flat loss / this at least 20, extra memory at most 5% of that of F.linear + F.cross_entropy."
)
MOST_DRIFT = 0.05
"""Processes whose reference copy or product differs by more than this are listed."""
LEAST_SHARE = 0.02
"""Kernels with less of a step's time are left out."""


def spread(seconds: Sequence[float]) -> float:
    """Half the interquartile range."""
    if len(seconds) < 2:
        return 0.0
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / 2


def middle(entry: Entry, part: str = "both") -> float | None:
    """Median seconds of a part of a step, or None."""
    return median(entry["seconds"][part]) if entry.get("seconds") else None


def moved(entry: Entry, part: str) -> int:
    """Compulsory bytes of a part of a step."""
    compulsory: Mapping[str, int] = entry["traffic"]["compulsory"]
    return sum(compulsory.values()) if part == "both" else compulsory[part]


def traffic_ratio(entry: Entry, part: str) -> float | None:
    """Time of a part of a step, relative to a copy of its compulsory bytes in the same process."""
    seconds = middle(entry, part)
    if seconds is None or "traffic" not in entry:
        return None
    copied = median(r["copy_bytes_per_second"] for r in entry["reference"])
    return seconds * copied / moved(entry, part)


def of_setting(results: Mapping[str, Any], setting: str) -> dict[str, Entry]:
    """Entries of the contestants of a setting, in their order."""
    entries = results["entries"]
    keys = {name: f"benchmarks/{setting}/{name}" for name in CONTESTANTS}
    return {name: entries[key] for name, key in keys.items() if key in entries}


def fastest_flat(there: Mapping[str, Entry]) -> float | None:
    """Median seconds of the fastest flat loss."""
    flat = (middle(entry) for name, entry in there.items() if CONTESTANTS[name].kind == "flat")
    return min((seconds for seconds in flat if seconds is not None), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _detail(entry: Entry) -> str:
    return str(entry.get("detail", "")).partition("\n")[0]


def _counts(entry: Entry) -> str:
    counts = ", ".join(f"{count} {what}" for what, count in entry.get("counts", {}).items())
    return "; ".join(filter(None, (counts, _detail(entry))))


def _stages(entries: Mapping[str, Entry]) -> str:
    """The stages before the benchmarks, and at most 20 failed tests of each."""
    rows = [one for one in entries.items() if not one[0].startswith("benchmarks/")]
    if not rows:
        return ""
    stages = table(
        "Stages",
        rows,
        [
            ("stage", lambda row: row[0]),
            ("outcome", lambda row: row[1]["outcome"]),
            ("", lambda row: _counts(row[1])),
            ("seconds", lambda row: row[1]["seconds_taken"], decimals(0)),
        ],
    )
    failures = [f"Failed: `{test}`" for _, entry in rows for test in entry.get("failures", [])[:20]]
    return markdown([stages], failures)


def _times(there: Mapping[str, Entry]) -> Table:
    eager, fastest = middle(there.get(EAGER, {})), fastest_flat(there)

    def title(entry: Entry) -> str:
        measured = entry["outcome"] == "measured"
        return entry["title"] + ("" if measured else f": {entry['outcome']}, {_detail(entry)}")

    def milliseconds(part: str) -> tuple[str, Any, Any]:
        def cell(seconds: Sequence[float] | None) -> str:
            if not seconds:
                return ""
            return f"{1000 * median(seconds):,.3f} ± {1000 * spread(seconds):.3f}"

        return f"{part}, ms", lambda entry: entry.get("seconds", {}).get(part), cell

    def memory(peak: int | None) -> str:
        return "" if peak is None else f"{peak / 2**20:,.0f}"

    return table(
        "Steps",
        there.values(),
        [
            ("", title),
            *map(milliseconds, ("forward", "backward", "both")),
            ("extra memory, MiB", lambda entry: entry.get("peak_bytes"), memory),
            ("eager / this", lambda entry: ratio(eager, middle(entry)), decimals(2)),
            ("fastest flat loss / this", lambda entry: ratio(fastest, middle(entry)), decimals(2)),
        ],
    )


def _traffic(there: Mapping[str, Entry]) -> Table:
    rows = [
        (entry, part)
        for entry in there.values()
        if "traffic" in entry
        for part in entry.get("seconds", ())
    ]
    return table(
        "Compulsory bytes",
        rows,
        [
            ("", lambda row: row[0]["title"]),
            ("part", lambda row: row[1]),
            ("ms", lambda row: 1000 * middle(*row), decimals(3)),
            ("MiB", lambda row: moved(*row) / 2**20, decimals(0)),
            ("GB/s of these", lambda row: moved(*row) / middle(*row) / 1e9, decimals(0)),
            ("time / copy of these", lambda row: traffic_ratio(*row), decimals(2)),
        ],
    )


def _kernels(there: Mapping[str, Entry]) -> Table:
    rows = []
    for entry in there.values():
        kernels = entry.get("kernel_seconds", {})
        if any(name.endswith("_kernel") for name in kernels):
            least = LEAST_SHARE * sum(kernels.values())
            shown = sorted(kernels.items(), key=lambda item: -item[1])
            rows += [(entry, name, seconds) for name, seconds in shown if seconds >= least]
    return table(
        f"Kernels with at least {LEAST_SHARE:.0%} of a step",
        rows,
        [
            ("", lambda row: row[0]["title"]),
            ("kernel", lambda row: row[1]),
            ("ms of a step", lambda row: 1000 * row[2], decimals(3)),
        ],
    )


def _range(values: Sequence[str]) -> str:
    """The range of the numbers, or all different texts."""
    try:
        numbers = sorted(float(value) for value in values)
    except ValueError:
        return ", ".join(sorted(set(values)))
    return f"{numbers[0]:g} to {numbers[-1]:g}" if numbers[0] < numbers[-1] else f"{numbers[0]:g}"


def _machine(there: Mapping[str, Entry]) -> Iterator[str]:
    """How much the speed of the machine differed between processes."""
    measured = {n: e for n, e in there.items() if len(e.get("reference", ())) == 2}
    if not measured:
        return
    for figure, unit, what in (
        ("copy_bytes_per_second", 1e9, "GB/s of a copy"),
        ("product_flops", 1e12, "TFLOP/s of a matrix product"),
    ):
        of = {name: [r[figure] for r in entry["reference"]] for name, entry in measured.items()}
        values = [value for own in of.values() for value in own]
        usual = median(values)
        far = [n for n, own in of.items() if any(abs(v / usual - 1) > MOST_DRIFT for v in own)]
        yield (
            f"{what}, before and after each contestant: median {usual / unit:,.1f}, from "
            f"{min(values) / unit:,.1f} to {max(values) / unit:,.1f}"
            + (f"; more than {MOST_DRIFT:.0%} off: {', '.join(far)}" if far else "")
            + "."
        )
    clocks = [e["clocks"] for e in measured.values() if e.get("clocks")]
    for field in clocks[0] if clocks else ():
        yield f"{field} while the contestants ran: {_range([c[field] for c in clocks])}."
    sources = sorted({e["sources"] for e in measured.values()})
    if len(sources) > 1:
        yield f"Sources of hstree differ between contestants: {', '.join(sources)}."


def page(results: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    entries, device = results["entries"], results["device"]
    dates = sorted({call["date"][:10] for call in results["calls"]})
    gpus = [e["machine"]["gpu"] for e in entries.values() if e.get("machine", {}).get("gpu")]
    drivers = sorted({gpu.get("driver") or "unknown" for gpu in gpus}) or ["unknown"]
    parts = [
        f"# hstree on {device['name']}",
        f"torch {device['torch']}, CUDA {device['cuda']}, driver {', '.join(drivers)}, "
        f"{', '.join(dates)}.",
        TARGETS,
        _stages(entries),
    ]
    for name, setting in SETTINGS.items():
        there = of_setting(results, name)
        if not there:
            continue
        shown = [_times(there), _traffic(there), _kernels(there)]
        parts += [
            f"## {name}",
            f"{setting}; binary trees T = {setting.trees}, wide heads T = {setting.wide_trees}, "
            f"C = {setting.root}; {setting.rounds} rounds, median ± half the interquartile "
            "range; extra memory includes the gradients.",
            markdown([one for one in shown if one.rows], _machine(there)),
        ]
    if text := entries.get("decoding", {}).get("table"):
        parts += ["## Decoding", text]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("results", type=Path, help="results.json of benchmarks.gpu_proof")
    print(page(json.loads(parser.parse_args(arguments).results.read_text())), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
