"""Tables and a plot of the results of benchmarks.gpu_proof in results.json.

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

from benchmarks.gpu_settings import EAGER, SETTINGS, contestants
from benchmarks.targets import Target, target_table

Entry = dict[str, Any]

MOST_TRAFFIC = 2.0
"""Target: time of a step over binary trees / time to copy its compulsory bytes."""
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


def middle(entry: Mapping[str, Any], part: str = "both") -> float | None:
    """Median seconds of a part of a step, or None."""
    return median(entry["seconds"][part]) if entry.get("seconds") else None


def bandwidth(entry: Mapping[str, Any]) -> float:
    """Bytes per second of the copies in the contestant's own process."""
    return median(r["copy_bytes_per_second"] for r in entry["reference"])


def traffic_ratio(entry: Mapping[str, Any], part: str) -> float | None:
    """Time of a part of a step, relative to a copy of its compulsory bytes."""
    seconds = middle(entry, part)
    if seconds is None or "traffic" not in entry:
        return None
    return seconds * bandwidth(entry) / moved(entry, part)


def moved(entry: Mapping[str, Any], part: str) -> int:
    compulsory: Mapping[str, int] = entry["traffic"]["compulsory"]
    return sum(compulsory.values()) if part == "both" else compulsory[part]


def of_setting(results: Mapping[str, Any], setting: str) -> dict[str, Entry]:
    """Entries of the contestants of a setting, in their order."""
    entries = results["entries"]
    return {
        name: entries[f"benchmarks/{setting}/{name}"]
        for name in contestants(setting)
        if f"benchmarks/{setting}/{name}" in entries
    }


def targets(results: Mapping[str, Any]) -> list[tuple[Target, float | None]]:
    """Targets and measurements; None if a result is missing."""
    rows: list[tuple[Target, float | None]] = []

    def add(target: Target, reached: float | None) -> None:
        rows.append((target, reached))

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    for setting in SETTINGS:
        there = of_setting(results, setting)
        known = contestants(setting)
        flat = {n: s for n, e in there.items() if known[n].kind == "flat" and (s := middle(e))}
        fastest = min(flat, key=lambda name: flat[name]) if flat else None
        eager = there.get(EAGER, {})
        for name, entry in there.items():
            kind, title = known[name].kind, f"{setting}: {entry['title']}"
            if kind == "paths":
                add(
                    Target(f"{title} / compulsory bytes", at_most=MOST_TRAFFIC),
                    traffic_ratio(entry, "both"),
                )
            if kind == "function":
                for part in ("forward", "backward"):
                    add(Target(f"{title}, {part} / copy", at_most=1.2), traffic_ratio(entry, part))
            if kind in ("paths", "wide") and fastest is not None:
                add(
                    Target(
                        f"fastest flat loss ({known[fastest].title}) / {title}",
                        at_least=20 if kind == "paths" else None,
                    ),
                    ratio(flat[fastest], middle(entry)),
                )
            if kind == "paths":
                add(
                    Target(f"{title}, extra memory / {known[EAGER].title}", at_most=0.05),
                    ratio(entry.get("peak_bytes"), eager.get("peak_bytes")),
                )
    return rows


# ---- Markdown


def _number(value: float | None, digits: int = 2) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """A Markdown table whose columns after the first `texts` are numbers."""
    if not rows:
        return []
    line = ["---"] * texts + ["---:"] * (len(head) - texts)
    return ["", *(f"| {' | '.join(row)} |" for row in (head, line, *rows))]


def _detail(entry: Mapping[str, Any]) -> str:
    return str(entry.get("detail", "")).partition("\n")[0].replace("|", "/")


def _stages(entries: Mapping[str, Entry]) -> list[str]:
    rows = []
    for name, entry in entries.items():
        stage = name.partition("/")[0]
        if stage == "benchmarks":
            continue
        counts = ", ".join(f"{count} {what}" for what, count in entry.get("counts", {}).items())
        rows.append(
            [name, entry["outcome"], "; ".join(t for t in (counts, _detail(entry)) if t),
             f"{entry['seconds_taken']:.0f}"]
        )  # fmt: skip
    failures = [
        f"- `{test}`"
        for name, entry in entries.items()
        if name.startswith(("tests/", "sanitizer/"))
        for test in entry.get("failures", [])[:20]
    ]
    lines = _table(["stage", "outcome", "", "seconds"], rows, 3)
    return lines + (["", "Failures (at most 20 of each file):", "", *failures] if failures else [])


def _times(there: Mapping[str, Entry]) -> list[str]:
    eager = middle(there.get(EAGER, {}))
    rows = []
    for entry in there.values():
        if not entry.get("seconds"):
            rows.append([f"{entry['title']}: {entry['outcome']}, {_detail(entry)}", *[""] * 5])
            continue
        cells = [
            f"{1000 * median(s):,.3f} ± {1000 * spread(s):.3f}" for s in entry["seconds"].values()
        ]
        peak = entry.get("peak_bytes")
        cells.append(_number(None if peak is None else peak / 2**20, 0))
        both = middle(entry)
        cells.append(_number(eager / both if eager and both else None))
        note = "" if entry["outcome"] == "measured" else f" ({entry['outcome']}, {_detail(entry)})"
        rows.append([entry["title"] + note, *cells])
    head = ["", "forward, ms", "backward, ms", "both, ms", "extra memory, MiB", "eager / this"]
    return _table(head, rows)


def _traffic(there: Mapping[str, Entry]) -> list[str]:
    rows = []
    for entry in there.values():
        for part in entry.get("seconds", {}) if "traffic" in entry else ():
            seconds, ratio = middle(entry, part), traffic_ratio(entry, part)
            assert seconds is not None
            rate = moved(entry, part) / seconds / 1e9
            rows.append(
                [entry["title"], part, _number(1000 * seconds, 3),
                 _number(moved(entry, part) / 2**20, 0), _number(rate, 0), _number(ratio)]
            )  # fmt: skip
    head = ["", "part", "ms", "compulsory MiB", "GB/s of these", "time / copy of these"]
    return _table(head, rows, 2)


def _kernels(there: Mapping[str, Entry]) -> list[str]:
    rows = []
    for entry in there.values():
        asked = entry.get("traffic", {}).get("kernels", {})
        kernels = entry.get("kernel_seconds", {})
        if not any(name.endswith("_kernel") for name in kernels):
            continue
        least = LEAST_SHARE * sum(kernels.values())
        for name, seconds in sorted(kernels.items(), key=lambda item: -item[1]):
            if seconds < least:
                break
            rate = _number(asked[name] / seconds / 1e9, 0) if name in asked else ""
            rows.append([entry["title"], name, _number(1000 * seconds, 3), rate])
    return _table(
        ["", "kernel of at least 2%", "ms of a step", "GB/s requested from the caches"], rows, 2
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
    yield ""
    for figure, unit, what in (
        ("copy_bytes_per_second", 1e9, "GB/s of a copy"),
        ("product_flops", 1e12, "TFLOP/s of a matrix product"),
    ):
        all_of_them = [r[figure] for e in measured.values() for r in e["reference"]]
        usual = median(all_of_them)
        far = [
            name
            for name, entry in measured.items()
            if any(abs(r[figure] / usual - 1) > MOST_DRIFT for r in entry["reference"])
        ]
        yield (
            f"{what}, before and after each contestant: median {usual / unit:,.1f}, from "
            f"{min(all_of_them) / unit:,.1f} to {max(all_of_them) / unit:,.1f}"
            + (f"; more than {MOST_DRIFT:.0%} off: {', '.join(far)}" if far else "")
            + "."
        )
    clocks = [e["clocks"] for e in measured.values() if e.get("clocks")]
    if clocks:
        for field in clocks[0]:
            yield f"{field} while the contestants ran: {_range([c[field] for c in clocks])}."
    sources = sorted({e["sources"] for e in measured.values()})
    if len(sources) > 1:
        yield f"Sources of hstree differ between contestants: {', '.join(sources)}."


def tables(results: Mapping[str, Any]) -> str:
    """The whole report as Markdown."""
    entries, device = results["entries"], results["device"]
    dates = sorted({call["date"][:10] for call in results["calls"]})
    drivers = sorted(
        {e["machine"]["gpu"].get("driver") or "unknown"
         for e in entries.values() if e.get("machine", {}).get("gpu")}
    )  # fmt: skip
    lines = [
        f"# hstree on {device['name']}",
        "",
        f"torch {device['torch']}, CUDA {device['cuda']}, driver "
        f"{', '.join(drivers) or 'unknown'}, {', '.join(dates)}.",
        *_stages(entries),
    ]
    for name, setting in SETTINGS.items():
        there = of_setting(results, name)
        if not there:
            continue
        lines += [
            "",
            f"## {name}",
            "",
            f"{setting}; binary trees T = {setting.trees}, wide heads T = {setting.wide_trees}, "
            f"C = {setting.root}; {setting.rounds} rounds, median ± half the interquartile "
            "range; extra memory includes the gradients.",
            *_times(there),
            *_traffic(there),
            *_kernels(there),
            *_machine(there),
        ]
    if table := entries.get("decoding", {}).get("table"):
        lines += ["", "## Decoding", "", table.strip()]
    if reached := targets(results):
        lines += ["", *target_table("", reached)]
    return "\n".join(lines)


# ---- picture


def plot(results: Mapping[str, Any]) -> bytes | None:
    """A plot of forward and backward of all contestants as PNG; None without results."""
    shown = {
        name: {n: e for n, e in of_setting(results, name).items() if e.get("seconds")}
        for name in SETTINGS
    }
    shown = {name: there for name, there in shown.items() if there}
    if not shown:
        return None
    from hstree.lm._pictures import COLOURS, new_figure, picture, plain

    most = max(map(len, shown.values()))
    figure = new_figure(8, len(shown) * (1 + 0.22 * most))
    for axes, (name, there) in zip(
        figure.subplots(len(shown), squeeze=False)[:, 0], shown.items(), strict=True
    ):
        for place, (key, entry) in enumerate(there.items()):
            seconds = [1000 * s for s in entry["seconds"]["both"]]
            colour = COLOURS[0 if contestants(name)[key].ours else 1]
            axes.barh(
                place, median(seconds), color=colour, xerr=1000 * spread(entry["seconds"]["both"])
            )
        axes.set_yticks(range(len(there)), [plain(e["title"]) for e in there.values()], fontsize=7)
        axes.invert_yaxis()
        axes.set(xscale="log", xlabel="ms, forward and backward", title=str(SETTINGS[name]))
        axes.title.set_fontsize(8)
    content: bytes = picture(figure)
    return content


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("results", type=Path, help="results.json of benchmarks.gpu_proof")
    print(tables(json.loads(parser.parse_args(arguments).results.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
