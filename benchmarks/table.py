"""The tables of a benchmark run, as Markdown, from the JSON of pytest-benchmark.

    pytest benchmarks --benchmark-only --benchmark-json=run.json
    python -m benchmarks.table run.json [--save benchmarks/results/NAME.json] [--readme README.md]
        [--plot benchmarks/results/time-per-row.png]

Times stand as multiples of a baseline's in the same run: a CPU's milliseconds say little elsewhere.
``--save`` keeps the figures with machine, versions and date; ``--readme`` replaces what stands
between the markers of each table, ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``: benchmarks,
decoding and tree-targets (trees), heads, targets. A table of which the run has nothing stays as it
is. ``--plot`` draws how the time of a row grows with the classes.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hstree
from benchmarks.decoding import DECODED_ROWS, QUESTIONS, SOFTMAX, TREES
from benchmarks.ensembles import ADAPTIVE, KERNELS, MODULE
from benchmarks.heads import FLAT, FORMULAS, LARGE_CHUNKS, OWN_CHUNKS, SMALL_CHUNKS
from benchmarks.optimizers import ADAM, LOSS, OPTIMIZER_SIZES, OPTIMIZERS, TORCH_ADAM
from benchmarks.paths import CLASSES, PATH_SIZES
from benchmarks.plot import plot_growth
from benchmarks.targets import Target, number, target_table

Contest = dict[str, dict[str, Any]]

FLAT_LOSSES = (FLAT, OWN_CHUNKS, SMALL_CHUNKS, LARGE_CHUNKS)


@dataclass(frozen=True)
class Ratio(Target):
    """A ratio of two contestants; of several names the fastest counts."""

    contest: str
    of: str | tuple[str, ...]
    to: str | tuple[str, ...]
    figure: str = "seconds"
    to_figure: str | None = None  # figure

    def reached(self, contests: dict[str, Any]) -> float | None:
        contestants = contests.get(self.contest, {}).get("contestants", {})
        return ratio(contestants, self.of, self.to, self.figure, self.to_figure)


TARGETS = [
    Ratio("PLIF by itself / log_softmax", "plif", "hstree.ops.plif", "log_softmax", at_most=3),
    Ratio("PLIF by gather / PLIF by itself", "plif", "gather", "hstree.ops.plif", at_least=4),
    Ratio("step of `plif` / of `softmax`", "heads", "plif", "softmax", at_most=1.15),
    Ratio(f"step of `plif` / {FLAT}", "heads", "plif", FLAT, at_most=1.15),
    Ratio("step of `sigsoftmax` / of `softmax`", "heads", "sigsoftmax", "softmax", at_most=1.05),
    Ratio("step of `gss` / of `softmax`", "heads", "gss", "softmax", at_most=1.05),
    Ratio(f"step of `softmax` / {SMALL_CHUNKS}", "heads", "softmax", SMALL_CHUNKS),
    Ratio(
        "step of `mos` / all log-probabilities", "mos", "mos", "all log-probabilities", at_most=0.8
    ),
    Ratio(
        "peak extra memory of `mos` / all log-probabilities",
        "mos",
        "mos",
        "all log-probabilities",
        figure="peak_bytes",
        at_most=0.125,
    ),
    Ratio("step of `mos` / its 3 K matrix products", "mos", "mos", "3 K products"),
]


def _path_targets() -> list[Ratio]:
    targets = []
    wanted = {1: (200, 600, 4000), 8: (40, 120, 700)}
    for t in (8, 1):
        ours = f"hstree, T = {t}"
        torch_trees = (f"torch tree, T = {t}", f"torch tree, bags, T = {t}")
        for size, times in zip(PATH_SIZES, wanted[t], strict=True):
            contest, of = f"path, V = {size.classes}", f"path, T = {t}, V = {size.classes}"
            targets += [
                Ratio(f"fastest flat loss / {of}", contest, FLAT_LOSSES, ours, at_least=times),
                Ratio(
                    f"fastest torch tree / {of}",
                    contest,
                    torch_trees,
                    ours,
                    at_least=4 if t == 8 else None,
                ),
                _memory_target(of, contest, ours),
            ]
    return targets


def _memory_target(title: str, contest: str, name: str) -> Ratio:
    return Ratio(
        f"peak extra memory of {title} / (1.5 of its row-sparse gradient + 16 MiB)",
        contest,
        name,
        name,
        figure="peak_bytes",
        to_figure="allowed_bytes",
        at_most=1,
    )


TREE_TARGETS = [
    *_path_targets(),
    *(
        Ratio(
            f"path, T = {t}: one thread / two threads",
            "threads",
            f"T = {t}, threads = 1",
            f"T = {t}, threads = 2",
            at_least=1.7,
        )
        for t in (8, 1)
    ),
    *(
        Ratio(
            f"path, T = {t}: {what}, V = {CLASSES[-1]} / V = {CLASSES[0]}",
            f"growth, T = {t}",
            f"V = {CLASSES[-1]}",
            f"V = {CLASSES[0]}",
            figure=figure,
        )
        for t in (8, 1)
        for what, figure in (("nodes on a path", "visits"), ("time of a row", "seconds"))
    ),
    *(
        Ratio(
            f"node visit in {title} / in hstree, D = {features}",
            f"{library}, D = {features}",
            library,
            "hstree",
            figure="visit_seconds",
            at_least=1,
        )
        for library, title in (("gensim", "gensim"), ("fasttext", "fastText"))
        for features in (400, 100)
    ),
    *(
        Ratio(
            f"path, T = {t}: bfloat16 / float32",
            "precision",
            f"T = {t}, bfloat16",
            f"T = {t}, float32",
            at_most=1,
        )
        for t in (8, 1)
    ),
    Ratio(
        "error of path in bfloat16 / of torch's tree in bfloat16",
        "precision",
        "T = 8, bfloat16",
        "torch tree, T = 8, bfloat16",
        figure="error",
        at_most=1,
    ),
    Ratio("fastest flat loss / wide `TreeEnsemble`", "wide", FLAT_LOSSES, MODULE, at_least=12),
    Ratio(f"{ADAPTIVE} / wide `TreeEnsemble`", "wide", ADAPTIVE, MODULE, at_least=1),
    Ratio("leaf groups / root", "wide parts", "leaf groups", "root", at_most=1),
    _memory_target("wide `TreeEnsemble`", "wide", MODULE),
    Ratio("wide `TreeEnsemble` / its kernels", "wide parts", MODULE, KERNELS, at_most=1.3),
    Ratio("binary `TreeEnsemble` / its kernels", "binary parts", MODULE, KERNELS, at_most=1.3),
    *(
        Ratio(
            f"step of {name} / path, T = 8, V = {size.classes}",
            f"optimizers, V = {size.classes}",
            name,
            LOSS,
        )
        for size in OPTIMIZER_SIZES
        for name in OPTIMIZERS
        if name != LOSS
    ),
    *(
        Ratio(
            f"{TORCH_ADAM} / {ADAM}, V = {size.classes}",
            f"optimizers, V = {size.classes}",
            TORCH_ADAM,
            ADAM,
            at_least=2,
        )
        for size in OPTIMIZER_SIZES
    ),
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


def ratio(
    contestants: Contest,
    of: str | tuple[str, ...],
    to: str | tuple[str, ...],
    figure: str = "seconds",
    to_figure: str | None = None,
) -> float | None:
    """Median over the rounds of the ratio within a round; of other figures the ratio. None without
    figures."""
    above, below = _figures(contestants, of, figure), _figures(contestants, to, to_figure or figure)
    if not above or not below:
        return None
    return median(a / b for a, b in zip(above, below, strict=True))


def _figures(contestants: Contest, names: str | tuple[str, ...], figure: str) -> list[float]:
    """One for each round, or one; the least of several contestants, as far as they are there."""
    names = (names,) if isinstance(names, str) else names
    found = []
    for contestant in (contestants[name] for name in names if name in contestants):
        if figure == "visit_seconds":
            found.append([s / contestant["visits"] for s in contestant["seconds"]])
        elif contestant.get(figure):
            value = contestant[figure]
            found.append(value if isinstance(value, list) else [value])
    return [min(values) for values in zip(*found, strict=True)]


def path_table(results: dict[str, Any]) -> list[str]:
    """The path kernel and what it is measured against, by number of classes."""
    contests = results["contests"].get("cpu", {})
    names = [f"path, V = {size.classes}" for size in PATH_SIZES]
    there = [contests[name] for name in names if name in contests]
    if not there:
        return []
    sizes = " | ".join(contest["size"] for contest in there)
    memory = min(1, len(there) - 1)
    unit = "hstree, T = 1"
    lines = [
        f"| forward + backward, one core | {sizes} | peak extra memory, "
        f"{there[memory]['size'].split(', ')[-1]} |",
        f"| --- |{' ---: |' * (len(there) + 1)}",
    ]
    for name in there[0]["contestants"]:
        times = [number(ratio(contest["contestants"], name, unit)) for contest in there]
        peak = there[memory]["contestants"][name].get("peak_bytes")
        times.append("not measured" if peak is None else f"{peak / 2**20:,.0f} MiB")
        lines.append(f"| {name} | {' | '.join(times)} |")
    seconds = (median(contest["contestants"][unit]["seconds"]) for contest in there)
    lines += ["", f"1 = {', '.join(f'{1000 * s:.2g} ms' for s in seconds)}."]
    return lines


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
                    number(ratio(contestants, head, FLAT)),
                    number(ratio(contestants, head, FLAT, "peak_bytes")),
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


def decoding_table(results: dict[str, Any]) -> list[str]:
    """What is asked of a trained head, as multiples of all classes of a softmax."""
    contests = results["contests"].get("cpu", {})
    there = [n for n in DECODED_ROWS if f"decoding, N = {n}" in contests]
    if not there:
        return []
    columns = [f"{question}, N = {n}" for n in there for question in QUESTIONS]
    lines = [f"| one core | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    unit = f"{SOFTMAX}: {next(iter(QUESTIONS))}"
    of = [contests[f"decoding, N = {n}"]["contestants"] for n in there]
    for head in (SOFTMAX, *TREES):
        times = [
            number(ratio(contestants, f"{head}: {question}", unit))
            for contestants in of
            for question in QUESTIONS
        ]
        lines.append(f"| {head} | {' | '.join(times)} |")
    size = contests[f"decoding, N = {there[0]}"]["size"].split(", ", 1)[1]
    seconds = (median(contestants[unit]["seconds"]) for contestants in of)
    return [*lines, "", f"{size}; 1 = {', '.join(f'{1000 * s:.2g} ms' for s in seconds)}."]


def target_tables(results: dict[str, Any], targets: Sequence[Ratio]) -> list[str]:
    """For each device what was to be reached, and what was, as far as there are figures."""
    lines: list[str] = []
    for device, contests in results["contests"].items():
        reached = [(target, target.reached(contests)) for target in targets]
        title = "one core" if device == "cpu" else results["gpu"]
        made = target_table(title, [row for row in reached if row[1] is not None])
        if not made:
            continue
        if lines:
            lines.append("")
        lines += made
        if targets is TARGETS and "mos" in contests:
            lines += ["", f"`mos` here with {contests['mos']['size']}, K = 15."]
    return lines


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by the names of the markers, as far as there are figures."""
    made = {
        "benchmarks": path_table(results),
        "decoding": decoding_table(results),
        "tree-targets": target_tables(results, TREE_TARGETS),
        "heads": head_tables(results),
        "targets": target_tables(results, TARGETS),
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
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    results = summary(json.loads(arguments.run.read_text()))
    made = tables(results)
    print("\n\n".join(made.values()))
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=2) + "\n")
    if arguments.plot:
        plot_growth(results["contests"].get("cpu", {}), arguments.plot)
    if arguments.readme:
        try:
            text = replace(arguments.readme.read_text(), made)
        except ValueError as error:
            parser.error(f"{arguments.readme}: {error}")
        arguments.readme.write_text(text)


if __name__ == "__main__":
    main()
