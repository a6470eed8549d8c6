"""The tables of a benchmark run, as Markdown, from the JSON of pytest-benchmark.

    pytest benchmarks --benchmark-only --benchmark-json=run.json
    python -m benchmarks.table run.json [--save benchmarks/results/NAME.json] [--readme README.md]

Times stand as multiples of a baseline's in the same run: a CPU's milliseconds say little elsewhere.
``--save`` keeps the figures with machine, versions and date; ``--readme`` replaces what stands
between the markers of each table, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``: benchmarks
(trees), heads, targets. A table of which the run has nothing stays as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hstree
from benchmarks.heads import FLAT, FORMULAS

Contest = dict[str, dict[str, Any]]

CHUNKED = "F.linear_cross_entropy, chunks of 16 MiB"


@dataclass(frozen=True)
class Target:
    """A ratio of two contestants, and what it should be."""

    title: str
    contest: str
    of: str
    to: str
    figure: str = "seconds"
    at_most: float | None = None
    at_least: float | None = None

    @property
    def wanted(self) -> str:
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return f"at least {self.at_least:g}" if self.at_least is not None else ""


TARGETS = [
    Target("PLIF by itself / log_softmax", "plif", "hstree.ops.plif", "log_softmax", at_most=3),
    Target("PLIF by gather / PLIF by itself", "plif", "gather", "hstree.ops.plif", at_least=4),
    Target("step of `plif` / of `softmax`", "heads", "plif", "softmax", at_most=1.15),
    Target(f"step of `plif` / {FLAT}", "heads", "plif", FLAT, at_most=1.15),
    Target("step of `sigsoftmax` / of `softmax`", "heads", "sigsoftmax", "softmax", at_most=1.05),
    Target("step of `gss` / of `softmax`", "heads", "gss", "softmax", at_most=1.05),
    Target(f"step of `softmax` / {CHUNKED}", "heads", "softmax", CHUNKED),
    Target(
        "step of `mos` / all log-probabilities", "mos", "mos", "all log-probabilities", at_most=0.8
    ),
    Target(
        "peak extra memory of `mos` / all log-probabilities",
        "mos",
        "mos",
        "all log-probabilities",
        figure="peak_bytes",
        at_most=0.125,
    ),
    Target("step of `mos` / its 3 K matrix products", "mos", "mos", "3 K products"),
]


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Medians in seconds by group and test, and the contests by device, with what they were
    measured on."""
    groups: dict[str, dict[str, float]] = {}
    contests: dict[str, dict[str, Any]] = {}
    for entry in run["benchmarks"]:
        extra = entry.get("extra_info", {})
        if "contest" in extra:
            name = entry["group"].split(" (")[0]
            contests.setdefault(extra["device"], {})[name] = {
                "size": extra["size"],
                "contestants": extra["contest"],
            }
            continue
        name = entry["name"].removeprefix("test_").split("[")[0]
        variant = re.sub(r"-?\(.*\)", "", entry.get("param") or "")
        groups.setdefault(entry["group"], {})[f"{name} {variant}".strip()] = entry["stats"][
            "median"
        ]
    return {
        "date": run["datetime"][:10],
        "cpu": run["machine_info"]["cpu"].get("brand_raw", platform.processor()),
        "gpu": torch.cuda.get_device_name() if "cuda" in contests else None,
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hstree": hstree.__version__,
        "median_seconds": groups,
        "contests": contests,
    }


def ratio(contestants: Contest, of: str, to: str, figure: str = "seconds") -> float | None:
    """Median over the rounds of the ratio within a round; of bytes the ratio. None without
    figures."""
    if of not in contestants or to not in contestants:
        return None
    above, below = contestants[of].get(figure), contestants[to].get(figure)
    if not above or not below:
        return None
    if isinstance(above, list):
        return median(a / b for a, b in zip(above, below, strict=True))
    return float(above / below)


def tree_table(results: dict[str, Any]) -> list[str]:
    lines = []
    for group, medians in results["median_seconds"].items():
        if not any(name.startswith("torch") for name in medians):
            continue
        unit = min(medians.values())
        for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
            lines.append(f"| {group}: {name} | {seconds / unit:,.1f} |")
    if not lines:
        return []
    return ["| one core | time, the fastest of its group = 1 |", "| --- | ---: |", *lines]


def head_tables(results: dict[str, Any]) -> list[str]:
    """For each device the steps of all heads as multiples of torch's flat one."""
    lines: list[str] = []
    for device, contests in results["contests"].items():
        seen: set[str] = set()
        rows = []
        for name in ("heads", "mixtures"):
            contestants = contests.get(name, {}).get("contestants", {})
            for head, figures in contestants.items():
                if head in seen:
                    continue
                seen.add(head)
                cells = [
                    f"`{head}`" if head in hstree.heads.head_names() else head,
                    FORMULAS[head],
                    _number(ratio(contestants, head, FLAT)),
                    _number(ratio(contestants, head, FLAT, "peak_bytes")),
                    f"{figures['parameters'] / 1e6:,.2f} M",
                ]
                rows.append(f"| {' | '.join(cells)} |")
        if not rows:
            continue
        title = "head, one core" if device == "cpu" else f"head, {results['gpu']}"
        if lines:
            lines.append("")
        lines += [
            f"| {title} | P(y given h) | time | peak extra memory | parameters |",
            "| --- | --- | ---: | ---: | ---: |",
            *rows,
        ]
        contest = next(contests[name] for name in ("heads", "mixtures") if name in contests)
        flat = contest["contestants"][FLAT]
        unit = f"{median(flat['seconds']):.3g} s"
        if flat.get("peak_bytes"):
            unit += f" and {flat['peak_bytes'] / 2**20:,.0f} MiB"
        lines += [
            "",
            f"One training step, {contest['size']}, float32, gradients included; 1 = {unit}.",
        ]
    if lines and "cuda" not in results["contests"]:
        lines += ["", "On a GPU: not measured."]
    return lines


def target_table(results: dict[str, Any]) -> list[str]:
    """What was to be reached, and what was."""
    lines: list[str] = []
    for device, contests in results["contests"].items():
        rows = []
        for target in TARGETS:
            contestants = contests.get(target.contest, {}).get("contestants", {})
            reached = ratio(contestants, target.of, target.to, target.figure)
            if reached is not None:
                rows.append(f"| {target.title} | {target.wanted} | {_number(reached)} |")
        if not rows:
            continue
        if lines:
            lines.append("")
        title = "one core" if device == "cpu" else results["gpu"]
        lines += [f"| {title} | wanted | reached |", "| --- | --- | ---: |", *rows]
        if "mos" in contests:
            lines += ["", f"`mos` here with {contests['mos']['size']}, K = 15."]
    return lines


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}"


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by the names of the markers, as far as there are figures."""
    made = {
        "benchmarks": tree_table(results),
        "heads": head_tables(results),
        "targets": target_table(results),
    }
    source = (
        f"{results['cpu']}, one thread, torch {results['torch']}, Python {results['python']}, "
        f"{results['date']}."
    )
    return {name: "\n".join([*lines, "", source]) for name, lines in made.items() if lines}


def replace(text: str, made: dict[str, str]) -> str:
    """The text with the tables between their markers.

    Raises:
        ValueError: for a table whose markers the text does not have once, in order.
    """
    for name, table in made.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"expected one {begin} and one {end} after it")
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    results = summary(json.loads(arguments.run.read_text()))
    made = tables(results)
    print("\n\n".join(made.values()))
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.readme:
        try:
            text = replace(arguments.readme.read_text(), made)
        except ValueError as error:
            parser.error(f"{arguments.readme}: {error}")
        arguments.readme.write_text(text)


if __name__ == "__main__":
    main()
