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
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hstree.lm.report import Column, Table, markdown, table

Contest = Mapping[str, Mapping[str, Any]]
"""Figures by contestant."""
Record = dict[str, dict[str, dict[str, Any]]]
"""Contests by device and name, each with ``measured``, ``size`` and ``contestants``."""

INTRODUCTION = """\
# Speed and memory on a CPU

Each contest's contestants, as multiples of the first one's time: ratios within one run, so that
they compare on any machine; milliseconds are those of the machine that is named. Forward and
backward passes, gradients included; float32; one thread, except where threads are compared. V is
the number of classes, N the rows of a step, D the features. *Extra memory* is what one step adds to
the resident memory of a fresh process, gradients included, with every block of 64 KiB or more
mapped by itself; parameters, inputs and code are not counted. Where no instruction set is named, it
was AVX-512.

- *Training steps*: forward, backward and optimizer of an output layer. Heads have
  `hstree.optim.AdamW`, layers of torch `torch.optim.AdamW(fused=True)`; both sampled softmaxes
  have 128 negatives. Deferred: the layer after `hstree.defer_logits`. Forest: four trees of
  C = 256, on all classes or 512 negatives. Trees: `from_counts`; *binary*: `binary=True`. Classes
  are drawn from Zipf's law. Adaptive softmax: default cutoffs. Extra memory includes the
  optimizer's state. *Subwords*: classes as frequent as those of a text in SmolLM2's 49,152
  subwords, of which 21,817 occur.
- *Heads*, *default trees*, *mixtures*: a loss of every head; the documentation has their formulas.
  PLIF has 100,000 slopes, the monotonic network 1,000 units, the mixtures K = 15 components
  (Mixtape 4), `trees` four binary trees below a root of C = 256, `sampled` 128 negatives.
- *Path*: binary Huffman trees, T = 1 over all features, T = 8 over half of them each, with
  row-sparse gradients. `torch tree` is the same trees in torch's own operators: the paths of the
  batch packed in one list, with sparse `F.embedding` gradients. `bags` is the same without copying
  any vector, as weighted `F.embedding_bag`s, the fastest that we could find. *Growth*: the same
  trees by the number of classes.
- *Decoding*: a trained head computes the log-probabilities of all classes, the ten most probable,
  the most probable one, or a draw. Untrained vectors that move the scores by about one, over Zipf's
  law. The fewer classes share the probability, the less of a tree the search for the most probable
  opens. *Forest*: the five most probable classes of a linear layer and of heads.
- *Optimizers*: steps with the row-sparse gradients of `path, T = 8`.
- *gensim*, *fasttext*: skip-gram over the same text. A node visit is one node on the path of one
  word: its score, gradients and update.
- *Trainer*: a step of a whole language model, 700 words."""

METHOD = """\
## How it was measured

```bash
pip install -r tools/extra-benchmarks.txt  # optional: gensim and fastText
pytest benchmarks --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json --save benchmarks/results/cpu
```

With AVX2 alone, in a record of its own. Where the processor has AVX-512, the compiler of
torch.compile is to be told `-mno-avx512f` (`CXX`, a script), as GCC 12 otherwise inverts masks:

```bash
export ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
export HSTREE_CPU_CAPABILITY=avx2 TORCHINDUCTOR_CACHE_DIR=$(mktemp -d)
pytest benchmarks --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json --save benchmarks/results/cpu-avx2
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
        if "contest" not in extra:
            continue
        device = extra["device"]
        if device == "cpu":
            machine = f"{cpu}, CPU kernels for {extra['instructions']}"
        else:
            machine = torch.cuda.get_device_name()
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


def number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def time(contest: Mapping[str, Any], name: str) -> str:
    """A contestant's time as a multiple of the first one's, and its milliseconds."""
    contestants = contest["contestants"]
    if not (seconds := contestants[name].get("seconds")):
        return "not measured"
    milliseconds = 1000 * median(seconds)
    shown = f"{milliseconds:.2g}" if milliseconds < 10 else f"{milliseconds:,.0f}"
    return f"{number(ratio(contestants, name, next(iter(contestants))) or 0.0)} ({shown} ms)"


def contest_table(name: str, contest: Mapping[str, Any]) -> Table:
    """A row for each contestant; columns without figures are left out."""
    contestants: Contest = contest["contestants"]
    first = next(iter(contestants))

    def shown(
        get: Callable[[str], float | None], form: Callable[[float], str]
    ) -> Callable[[str], str]:
        return lambda of: "" if (value := get(of)) is None else form(value)

    columns: list[Column] = [("", str), ("time", lambda of: time(contest, of), str)]
    for title, get, form in (
        ("a node visit", lambda of: ratio(contestants, of, first, "visit"), number),
        (
            "extra memory",
            lambda of: contestants[of].get("peak_bytes"),
            lambda value: f"{value / 2**20:,.0f} MiB",
        ),
        (
            "parameters",
            lambda of: contestants[of].get("parameters") or None,
            lambda value: f"{value / 1e6:,.2f} M",
        ),
    ):
        cell = shown(get, form)
        if any(map(cell, contestants)):
            columns.append((title, cell, str))
    return table(name, contestants, columns)


def page(record: Record) -> str:
    """The results in Markdown, of what was measured."""
    parts = [INTRODUCTION]
    for device, contests in record.items():
        parts.append(f"## One {'core' if device == 'cpu' else 'GPU'}")
        parts += [
            markdown(
                [contest_table(name, contest)], [f"{contest['size']}. {contest['measured']}."]
            ).strip()
            for name, contest in contests.items()
        ]
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
