"""The page of a benchmark run, as Markdown, from the JSON of pytest-benchmark.

    pytest benchmarks --benchmark-only --benchmark-json=run.json
    python -m benchmarks.table run.json [--save benchmarks/results/cpu]

Times are multiples of a baseline's in the same run: a CPU's milliseconds say little about another
CPU. ``--save NAME`` writes the figures to NAME.json and the page to NAME.md. Where NAME.json
exists, contests that the run has not measured keep their figures; without a run, the page is made
again from NAME.json. Every contest keeps the machine, the versions and the date of its own run.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.decoding import (
    DECODED_ROWS,
    PRODUCT,
    QUESTIONS,
    SCREENED_CONTESTS,
    SCREENED_SIZES,
    SOFTMAX,
)
from benchmarks.heads import FLAT, FORMULAS
from benchmarks.optimizers import (
    LOSS,
    OPTIMIZER_SIZES,
    TRAINING,
    TRAINING_SIZES,
)
from benchmarks.paths import PATH_SIZES
from hstree.heads import head_names
from hstree.lm.report import Table, markdown, table

HEAD_TABLES = ("heads", "default trees", "mixtures")
Contest = Mapping[str, Mapping[str, Any]]
"""Figures by contestant."""
Record = dict[str, dict[str, dict[str, Any]]]
"""Contests by device and name, each with ``measured``, ``size`` and ``contestants``."""
Shown = tuple[list[Table], list[str]]
"""Tables and notes."""

INTRODUCTION = """\
# Speed and memory on a CPU

Ratios within one run, so that they compare on any machine; milliseconds are those of the machine
that is named. Forward and backward passes, gradients included; float32; one thread, except where
threads are compared. V is the number of classes, N the rows of a step, D the features."""

TRAINING_TEXT = """\
Forward, backward and optimizer of an output layer, as multiples of the first row. Heads have
`hstree.optim.AdamW`, layers of torch `torch.optim.AdamW(fused=True)`; the plain sampled softmax has
128 negatives, as `SampledSoftmax` has. Forest: four trees of C = 256, on all classes or 512
negatives. Trees: `from_counts`, that is four Huffman trees whose
leaves share one output embedding, with a root of C = 256 children, or 512 from V = 65,537. Below
it, one softmax for each child (two levels); *groups*: `leaf=16`, binary nodes over groups of 16,
the default of `sparse=True` from V = 12,001; *binary*: `leaf=1`. Classes are drawn from Zipf's law.
Adaptive softmax: default cutoffs, 2,000 and 10,000. Peak extra memory is that of a first step:
gradients and the optimizer's state included, parameters and inputs not."""

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
we could find."""

DECODING = """\
A trained head computes the log-probabilities of all classes, the ten most probable, the most
probable one, or a draw, as multiples of all classes of a softmax. Untrained vectors that move
the scores by about one, over Zipf's law. All classes cost T S / D times the softmax's products
and more. The fewer classes share the probability, the less of a tree the search for the most
probable opens."""

OPTIMIZERS = """\
Steps with the row-sparse gradients of `path, T = 8`, as multiples of its forward and backward."""

OTHERS = """\
Each contest's contestants, as multiples of the first one's time. A node visit is one node on the
path of one word: its score, gradients and update; against gensim and fastText in skip-gram over the
same text. *Wide*: a `TreeEnsemble` of T = 4 Huffman trees over all features with a root of C = 256
children, groups of G = 32 leaves and vectors of their own; *binary*: T = 8 over half of the
features. *Growth*: the same trees by the number of classes. *Trainer*: a step of a whole language
model, 700 words. Errors are those of gradients, relative to the largest true one. `mos` has K = 15
components."""

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
them, and the nodes that the paths of a step visit."""


def ratio(contestants: Contest, of: str, to: str, figure: str = "seconds") -> float | None:
    """Median over the rounds of the ratio within a round; of other figures the ratio. ``visit``:
    seconds of a node visit. None without figures."""
    above, below = (_figures(contestants.get(name, {}), figure) for name in (of, to))
    return median(a / b for a, b in zip(above, below, strict=True)) if above and below else None


def _figures(contestant: Mapping[str, Any], figure: str) -> list[float]:
    """One for each round, or one."""
    if figure == "visit":
        visits = contestant.get("visits")
        return [s / visits for s in contestant.get("seconds", ())] if visits else []
    value = contestant.get(figure)
    return value if isinstance(value, list) else [value] if value else []


def summary(run: Mapping[str, Any]) -> Record:
    """The contests of a run, each with what it was measured on."""
    record: Record = {}
    cpu = run["machine_info"]["cpu"].get("brand_raw", platform.processor())
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    for entry in run["benchmarks"]:
        extra = entry["extra_info"]
        device = extra["device"]
        machine = cpu if device == "cpu" else torch.cuda.get_device_name()
        record.setdefault(device, {})[extra["name"]] = {
            "measured": f"{machine}, {versions}, {run['datetime'][:10]}",
            "size": extra["size"],
            "contestants": extra["contest"],
        }
    return record


def merged(old: Record, new: Record) -> Record:
    """The results of two runs; of what both have measured, the new."""
    devices = [*old, *(new.keys() - old.keys())]
    return {device: old.get(device, {}) | new.get(device, {}) for device in devices}


def lines(record: Record) -> str:
    """The record as JSON, with a line for each contest."""
    parts = []
    for device, contests in record.items():
        of = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in contests.items())
        parts.append(f"{json.dumps(device)}: {{\n{of}\n}}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def sources(contests: Iterable[Mapping[str, Any]]) -> str:
    """What the contests were measured on, each machine, version and date once."""
    return "; ".join(dict.fromkeys(contest["measured"] for contest in contests)) + "."


def number(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _device(device: str) -> str:
    return "One core" if device == "cpu" else "One GPU"


def _mebibytes(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 2**20:,.0f} MiB"


def _time(contest: Mapping[str, Any], unit: str, name: str) -> str:
    """A contestant's time as a multiple of the unit's, and its milliseconds."""
    if not (seconds := contest["contestants"].get(name, {}).get("seconds")):
        return "not measured"
    milliseconds = 1000 * median(seconds)
    shown = f"{milliseconds:.2g}" if milliseconds < 10 else f"{milliseconds:,.0f}"
    return f"{number(ratio(contest['contestants'], name, unit))} ({shown} ms)"


def times(record: Record, contests: Mapping[str, str], unit: str, memory: str = "") -> Shown:
    """Times of all contestants as multiples of the unit's, for each device: a column for each
    title, of the contest of this name, and the peak extra memory of the one titled ``memory``."""
    tables, notes = [], []
    for device, of_device in record.items():
        there = {title: of_device[name] for title, name in contests.items() if name in of_device}
        if not there:
            continue
        columns: list[Any] = [("", str)]
        columns += [(title, partial(_time, one, unit), str) for title, one in there.items()]
        if memory in there:
            figures = there[memory]["contestants"]
            peak = partial(lambda figures, name: figures.get(name, {}).get("peak_bytes"), figures)
            columns.append((f"peak extra memory, {memory}", peak, _mebibytes))
        names = next(iter(there.values()))["contestants"]
        tables.append(table(_device(device), names, columns))
        notes.append(
            f"{'; '.join(one['size'] for one in there.values())}. {sources(there.values())}"
        )
    return tables, notes


def training(record: Record) -> Shown:
    """Steps with the optimizer's, as multiples of the first contestant's."""
    names = {f"V = {s.classes:,}": f"training steps, V = {s.classes}" for s in TRAINING_SIZES}
    return times(record, names, next(iter(TRAINING)), list(names)[-1])


def paths(record: Record) -> Shown:
    """The path kernel and what it is measured against, by number of classes."""
    names = {f"V = {size.classes:,}": f"path, V = {size.classes}" for size in PATH_SIZES}
    return times(record, names, "hstree, T = 1", list(names)[1])


def decoding(record: Record) -> Shown:
    """Decoding with a trained head, as multiples of all classes of a softmax; the best word of a
    screened softmax, as multiples of the product's."""
    rows = sorted({n for of_device in DECODED_ROWS.values() for n in of_device})
    names = {f"N = {n}": f"decoding, N = {n}" for n in rows}
    trees = times(record, names, f"{SOFTMAX}: {next(iter(QUESTIONS))}")
    screened = times(record, dict(zip(SCREENED_SIZES, SCREENED_CONTESTS, strict=True)), PRODUCT)
    return trees[0] + screened[0], trees[1] + screened[1]


def optimizers(record: Record) -> Shown:
    """Optimizer steps, as multiples of the pass that makes their gradients."""
    names = {f"V = {s.classes:,}": f"optimizers, V = {s.classes}" for s in OPTIMIZER_SIZES}
    return times(record, names, LOSS)


def heads(record: Record) -> Shown:
    """Steps of all heads as multiples of torch's flat one, for each device."""
    tables, notes = [], []
    for device, contests in record.items():
        there = [contests[name] for name in HEAD_TABLES if name in contests]
        if not there:
            continue
        rows: dict[str, tuple[str, Contest]] = {}
        for contest in there:
            for name in contest["contestants"]:
                rows.setdefault(name, (name, contest["contestants"]))
        columns: list[Any] = [
            ("head", lambda row: f"`{row[0]}`" if row[0] in head_names() else row[0]),
            ("P(y given h)", lambda row: FORMULAS[row[0]]),
            ("time", lambda row: ratio(row[1], row[0], FLAT), number),
            ("peak extra memory", lambda row: ratio(row[1], row[0], FLAT, "peak_bytes"), number),
            ("parameters", lambda row: row[1][row[0]]["parameters"] / 1e6, "{:,.2f} M".format),
        ]
        tables.append(table(_device(device), rows.values(), columns))
        flat = there[0]["contestants"][FLAT]
        unit = f"{median(flat['seconds']):.3g} s, {_mebibytes(flat.get('peak_bytes'))}"
        notes.append(f"{there[0]['size']}; 1 = {unit}. {sources(there)}")
    return tables, notes


def others(record: Record) -> Shown:
    """The contests that no other table has."""
    tables, notes = [], []
    shown = ("training steps", "path, V", "decoding", "screened", "optimizers", *HEAD_TABLES)
    for device, contests in record.items():
        rest = {name: one for name, one in contests.items() if not name.startswith(shown)}
        rows = [(name, one, of) for name, one in rest.items() for of in one["contestants"]]

        def figure(what: str, row: Any) -> float | None:
            return ratio(row[1]["contestants"], row[2], next(iter(row[1]["contestants"])), what)

        columns: list[Any] = [
            ("", lambda row: f"{row[0]}: {row[2]}"),
            ("time", lambda row: _time(row[1], next(iter(row[1]["contestants"])), row[2]), str),
            ("a node visit", partial(figure, "visit"), _maybe),
            ("extra memory", lambda row: row[1]["contestants"][row[2]].get("peak_bytes"), _memory),
            ("error", lambda row: row[1]["contestants"][row[2]].get("error"), _error),
        ]
        if rows:
            tables.append(table(_device(device), rows, columns))
            sizes = (f"{name}: {one['size']}" for name, one in rest.items())
            notes.append(f"{'; '.join(sizes)}. {sources(rest.values())}")
    return tables, notes


def _maybe(value: float | None) -> str:
    return "" if value is None else number(value)


def _memory(value: float | None) -> str:
    return "" if value is None else _mebibytes(value)


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def page(record: Record) -> str:
    """The results in Markdown, of what was measured."""
    parts = [INTRODUCTION]
    for title, text, shown in (
        ("A training step by number of classes", TRAINING_TEXT, training(record)),
        ("A loss of every head, with its gradients", HEADS, heads(record)),
        ("The tree operators", PATHS, paths(record)),
        ("Decoding", DECODING, decoding(record)),
        ("Optimizers", OPTIMIZERS, optimizers(record)),
        ("Other contests", OTHERS, others(record)),
    ):
        if shown[0]:
            parts += [f"## {title}", text, markdown(*shown).strip()]
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
    record = summary(json.loads(arguments.run.read_text())) if arguments.run else {}
    if arguments.save:
        figures = arguments.save.with_suffix(".json")
        if figures.exists():
            record = merged(json.loads(figures.read_text()), record)
        figures.write_text(lines(record))
        arguments.save.with_suffix(".md").write_text(page(record))
    print(page(record))


if __name__ == "__main__":
    main()
