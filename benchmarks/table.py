"""The page of a benchmark run, as Markdown, from the JSON of pytest-benchmark.

    pytest benchmarks --benchmark-only --benchmark-json=run.json
    python -m benchmarks.table run.json [--save benchmarks/results/cpu]

Times are multiples of a baseline's in the same run: a CPU's milliseconds say little about another
CPU. ``--save NAME`` writes the figures to NAME.json, the page to NAME.md, and the growth of the
time of a row with the number of classes to NAME.png. Where NAME.json exists, contests that the run
has not measured keep their figures; without a run, the page is made again from NAME.json. Every
contest keeps the machine, the versions and the date of its own run.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

import hstree
from benchmarks.decoding import DECODED_ROWS, QUESTIONS, SOFTMAX, TREES
from benchmarks.ensembles import ADAPTIVE, KERNELS, MODULE, SHARED_LEAVES, SHARED_SIZES
from benchmarks.heads import FLAT, FORMULAS, LARGE_CHUNKS, OWN_CHUNKS, SMALL_CHUNKS
from benchmarks.optimizers import (
    ADAM,
    LOSS,
    OPTIMIZER_SIZES,
    OPTIMIZERS,
    TORCH_ADAM,
    TRAINING_SIZES,
)
from benchmarks.paths import CLASSES, PATH_SIZES
from benchmarks.plot import plot_growth
from benchmarks.targets import Target, number, target_table

Contest = dict[str, dict[str, Any]]

INTRODUCTION = """\
# Speed and memory on a CPU

Ratios within one run, so that they compare on any machine; absolute times only say what 1 is.
Forward and backward passes, gradients included; float32; one thread, except where threads are
compared. V is the number of classes, N the rows of a step, D the features."""

TRAINING = """\
Forward, backward and optimizer of an output layer, as multiples of the last row. Trees:
`from_counts`, that is Huffman trees whose leaves share one output embedding, with a root of C = 256
children, or 512 from V = 65,537; two levels or, if sparse, from V = 16,385, binary nodes over
groups of 16. Binary trees: `leaf=1`. Classes are drawn from Zipf's law. Adaptive softmax: default
cutoffs, 2,000 and 10,000. Peak extra memory is that of a first step: gradients and the optimizer's
state included, parameters and inputs not."""

HEADS = """\
Time and memory are those of one training step without the optimizer, as multiples of those of
torch's own layer and loss. Peak extra memory is what one step adds to the resident memory of a
fresh process, gradients included, with every block of 64 KiB or more mapped by itself;
parameters, inputs and code are not counted."""

PATHS = """\
Binary Huffman trees, T = 1 over all features, T = 8 over half of them each. Peak extra memory
includes the gradients, row-sparse for trees. `torch tree` is the same trees in torch's own
operators: the paths of the batch packed in one list, with sparse `F.embedding` gradients.
`bags` is the same without copying any vector, as weighted `F.embedding_bag`s, the fastest that
we could find.

![Time of a row against the number of classes]({picture})"""

DECODING = """\
A trained head computes the log-probabilities of all classes, the ten most probable, the most
probable one, or a draw, as multiples of all classes of a softmax. Untrained vectors that move
the scores by about one, over Zipf's law. All classes cost T S / D times the softmax's products
and more. The fewer classes share the probability, the less of a tree the search for the most
probable opens."""

WIDE = """\
A wide `TreeEnsemble` is T = 4 Huffman trees over all features with a root of C = 256 children,
groups of G = 32 leaves and vectors of their own at (N, D, V) = (1400, 400, 33278). A binary one is
T = 8 over half of the features. A node visit is one node on the path of one word: its score,
gradients and update, in skip-gram over the same text."""

METHOD = """\
## How it was measured

```bash
pip install -r tools/extra-benchmarks.txt  # optional: gensim and fastText
pytest benchmarks --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json --save benchmarks/results/cpu
```

In each round every contestant has its turn, in order and back in the next round. A turn is as
many steps as fit into 0.1 s, at least one and at most twenty, after one that does not count
unless it takes longer than 1 s; its figure is their median. Times are CPU time of a process
with one thread, or wall time where threads are compared. Ratios are taken within a round, and
the tables show their medians. The `.json` file next to this page holds the seconds of every
round, the parameters, the bytes that a step adds at its peak, as `benchmarks/memory.py` counts
them, the bytes of row-sparse gradients, and the nodes that the paths of a step visit."""

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
    limits = {1: (200, 600, 4000), 8: (40, 120, 700)}
    for t in (8, 1):
        ours = f"hstree, T = {t}"
        torch_trees = (f"torch tree, T = {t}", f"torch tree, bags, T = {t}")
        for size, times in zip(PATH_SIZES, limits[t], strict=True):
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
            f"four trees, shared leaves, {name} / {FLAT}, V = {classes}",
            f"shared leaves, V = {classes}",
            name,
            FLAT,
            at_most=most,
        )
        for classes, most in zip(SHARED_SIZES, (0.25, 0.06), strict=True)
        for name in SHARED_LEAVES
    ),
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
    """Medians in seconds by group and test, and the contests by device, each with what it was
    measured on."""
    groups: dict[str, dict[str, Any]] = {}
    contests: dict[str, dict[str, Any]] = {}
    cpu = run["machine_info"]["cpu"].get("brand_raw", platform.processor())
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    date = run["datetime"][:10]
    for entry in run["benchmarks"]:
        extra = entry.get("extra_info", {})
        if "contest" in extra:
            name, device = entry["group"].split(" (")[0], extra["device"]
            machine = cpu if device == "cpu" else torch.cuda.get_device_name()
            contests.setdefault(device, {})[name] = {
                "measured": f"{machine}, {versions}, {date}",
                "size": extra["size"],
                "contestants": extra["contest"],
            }
            continue
        name = entry["name"].removeprefix("test_").split("[")[0]
        variant = re.sub(r"-?\(.*\)", "", entry.get("param") or "")
        group = groups.setdefault(
            entry["group"], {"measured": f"{cpu}, {versions}, {date}", "median_seconds": {}}
        )
        group["median_seconds"][f"{name} {variant}".strip()] = entry["stats"]["median"]
    return {"groups": groups, "contests": contests}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The results of two runs; of what both have measured, the new."""
    devices = [*old["contests"], *(new["contests"].keys() - old["contests"].keys())]
    return {
        "groups": old["groups"] | new["groups"],
        "contests": {
            device: old["contests"].get(device, {}) | new["contests"].get(device, {})
            for device in devices
        },
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


def sources(contests: Iterable[dict[str, Any]]) -> str:
    """What the contests were measured on, each machine, version and date once."""
    return "; ".join(dict.fromkeys(contest["measured"] for contest in contests)) + "."


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
    lines += ["", f"1 = {', '.join(f'{1000 * s:.2g} ms' for s in seconds)}. {sources(there)}"]
    return lines


def head_tables(results: dict[str, Any]) -> list[str]:
    """For each device the steps of all heads as multiples of torch's flat one."""
    lines: list[str] = []
    for device, contests in results["contests"].items():
        there = [contests[name] for name in ("heads", "mixtures") if name in contests]
        if not there:
            continue
        rows: dict[str, str] = {}
        for contest in there:
            contestants = contest["contestants"]
            for head, figures in contestants.items():
                if head in rows:
                    continue
                cells = [
                    f"`{head}`" if head in hstree.heads.head_names() else head,
                    FORMULAS[head],
                    number(ratio(contestants, head, FLAT)),
                    number(ratio(contestants, head, FLAT, "peak_bytes")),
                    f"{figures['parameters'] / 1e6:,.2f} M",
                ]
                rows[head] = f"| {' | '.join(cells)} |"
        flat = there[0]["contestants"][FLAT]
        unit = f"{median(flat['seconds']):.3g} s"
        if flat.get("peak_bytes"):
            unit += f" and {flat['peak_bytes'] / 2**20:,.0f} MiB"
        lines += [
            *([""] if lines else []),
            f"| head, {_device(device)} | P(y given h) | time | peak extra memory | parameters |",
            "| --- | --- | ---: | ---: | ---: |",
            *rows.values(),
            "",
            f"{there[0]['size']}, float32; 1 = {unit}. {sources(there)}",
        ]
    if lines and "cuda" not in results["contests"]:
        lines += ["", "On a GPU: not measured."]
    return lines


def training_table(results: dict[str, Any]) -> list[str]:
    """Steps with the optimizer's, as multiples of the last contestant's."""
    contests = results["contests"].get("cpu", {})
    names = [f"training steps, V = {size.classes}" for size in TRAINING_SIZES]
    there = [contests[name] for name in names if name in contests]
    if not there:
        return []
    memory = there[-1]["size"].split(", ")[-1]
    columns = [f"V = {size.classes:,}" for size in TRAINING_SIZES[: len(there)]]
    lines = [
        f"| one core | {' | '.join(columns)} | peak extra memory, {memory} |",
        f"| --- |{' ---: |' * (len(there) + 1)}",
    ]
    for name in there[-1]["contestants"]:
        cells = []
        for contest in there:
            contestants = contest["contestants"]
            milliseconds = 1000 * median(contestants[name]["seconds"])
            times = number(ratio(contestants, name, next(reversed(contestants))))
            cells.append(f"{times} ({milliseconds:,.0f} ms)")
        peak = there[-1]["contestants"][name].get("peak_bytes")
        cells.append("not measured" if peak is None else f"{peak / 2**20:,.0f} MiB")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    rows_and_features = there[0]["size"].rsplit(", ", 1)[0]
    return [*lines, "", f"{rows_and_features}. {sources(there)}"]


def decoding_table(results: dict[str, Any]) -> list[str]:
    """Decoding with a trained head, as multiples of all classes of a softmax."""
    contests = results["contests"].get("cpu", {})
    rows = [n for n in DECODED_ROWS["cpu"] if f"decoding, N = {n}" in contests]
    if not rows:
        return []
    there = [contests[f"decoding, N = {n}"] for n in rows]
    columns = [f"{question}, N = {n}" for n in rows for question in QUESTIONS]
    lines = [f"| one core | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(columns)}"]
    unit = f"{SOFTMAX}: {next(iter(QUESTIONS))}"
    of = [contest["contestants"] for contest in there]
    for head in (SOFTMAX, *TREES):
        times = [
            number(ratio(contestants, f"{head}: {question}", unit))
            for contestants in of
            for question in QUESTIONS
        ]
        lines.append(f"| {head} | {' | '.join(times)} |")
    size = there[0]["size"].split(", ", 1)[1]
    seconds = ", ".join(f"{1000 * median(c[unit]['seconds']):.2g} ms" for c in of)
    return [*lines, "", f"{size}; 1 = {seconds}. {sources(there)}"]


def target_tables(results: dict[str, Any], targets: Sequence[Ratio]) -> list[str]:
    """For each device the targets that have a figure, with it."""
    lines: list[str] = []
    for device, contests in results["contests"].items():
        rows = [(target, target.reached(contests)) for target in targets]
        rows = [row for row in rows if row[1] is not None]
        if not rows:
            continue
        if lines:
            lines.append("")
        lines += target_table(_device(device), rows)
        lines += ["", sources(contests[target.contest] for target, _ in rows)]
        if "mos" in {target.contest for target, _ in rows}:
            lines[-1] += f" `mos` here with {contests['mos']['size']}, K = 15."
    return lines


def _device(device: str) -> str:
    return "one core" if device == "cpu" else "one GPU"


def page(results: dict[str, Any], picture: str) -> str:
    """The results in Markdown, of what was measured."""
    parts = [INTRODUCTION]
    for title, text, lines in (
        ("A training step by number of classes", TRAINING, training_table(results)),
        ("A loss of every head, with its gradients", HEADS, head_tables(results)),
        ("The tree operators", PATHS.format(picture=picture), path_table(results)),
        ("Decoding", DECODING, decoding_table(results)),
        ("Targets: heads", "", target_tables(results, TARGETS)),
        ("Targets: trees", WIDE, target_tables(results, TREE_TARGETS)),
    ):
        if lines:
            parts += [f"## {title}", *([text] if text else []), "\n".join(lines)]
    return "\n\n".join([*parts, METHOD]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--save", type=Path, metavar="NAME")
    arguments = parser.parse_args()
    if arguments.run is None and arguments.save is None:
        parser.error("expected the JSON of a run, --save NAME or both, got neither")
    results: dict[str, Any] = {"groups": {}, "contests": {}}
    if arguments.run:
        results = summary(json.loads(arguments.run.read_text()))
    if arguments.save:
        figures = arguments.save.with_suffix(".json")
        if figures.exists():
            results = merged(json.loads(figures.read_text()), results)
        figures.write_text(json.dumps(results, indent=2) + "\n")
        picture = arguments.save.with_suffix(".png")
        plot_growth(results["contests"].get("cpu", {}), picture)
        arguments.save.with_suffix(".md").write_text(page(results, picture.name))
    print(page(results, "growth.png"))


if __name__ == "__main__":
    main()
