"""The table of a benchmark run, as Markdown, from the JSON of pytest-benchmark.

    pytest benchmarks --benchmark-only --benchmark-json=run.json
    python -m benchmarks.table run.json [--save benchmarks/results/NAME.json] [--readme README.md]

The medians of each group that has a baseline stand as multiples of its fastest row's: a CPU's
milliseconds say little elsewhere. ``--save`` keeps the medians with machine, versions and date;
``--readme`` replaces what stands between the two markers.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from pathlib import Path
from typing import Any

import torch

import hstree

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Medians in seconds by group and test, with what they were measured on."""
    groups: dict[str, dict[str, float]] = {}
    for entry in run["benchmarks"]:
        name = entry["name"].removeprefix("test_").split("[")[0]
        variant = re.sub(r"-?\(.*\)", "", entry.get("param") or "")
        groups.setdefault(entry["group"], {})[f"{name} {variant}".strip()] = entry["stats"][
            "median"
        ]
    return {
        "date": run["datetime"][:10],
        "cpu": run["machine_info"]["cpu"].get("brand_raw", platform.processor()),
        "threads": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hstree": hstree.__version__,
        "median_seconds": groups,
    }


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| one core | time, the fastest of its group = 1 |",
        "| --- | ---: |",
    ]
    for group, medians in results["median_seconds"].items():
        if not any(name.startswith("torch") for name in medians):
            continue
        unit = min(medians.values())
        for name, seconds in sorted(medians.items(), key=lambda item: item[1]):
            lines.append(f"| {group}: {name} | {seconds / unit:,.1f} |")
    lines.append("")
    lines.append(
        f"{results['cpu']}, one thread, torch {results['torch']}, Python {results['python']}, "
        f"{results['date']}."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--readme", type=Path)
    arguments = parser.parse_args()
    results = summary(json.loads(arguments.run.read_text()))
    table = markdown(results)
    print(table)
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.readme:
        text = arguments.readme.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        arguments.readme.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


if __name__ == "__main__":
    main()
