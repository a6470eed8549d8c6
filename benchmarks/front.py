"""The tables of README.md and docs/ that are made of the figures in benchmarks/results.

    python -m benchmarks.front

replaces the lines between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->`` in README.md,
docs/index.md, docs/decoding.md and docs/transformers.md, and time, memory and parameters in the
rows of docs/heads.md.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.heads import FLAT
from benchmarks.optimizers import TRAINING_SIZES
from benchmarks.table import Record, ratio, sources
from benchmarks.trees_study import CONTENDERS
from hstree.lab.study.records import Records
from hstree.lab.study.results import results
from hstree.lm.table import decimals, markdown, table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / page for page in ("README.md", "docs/index.md")]
UNIT = "linear"

# Contestants of the training steps, as README calls them, with those of benchmarks.trees_study.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "softmax"),
    "softmax": ("`hstree.Softmax`", "softmax"),
    "adaptive": ("`nn.AdaptiveLogSoftmaxWithLoss`", "adaptive"),
    "sampled": ("`hstree.SampledSoftmax`", "sampled-in-batch-128"),
    "trees": ("`hstree.TreeEnsemble`, 4 trees", "leaves-4x256"),
    "trees, groups, sparse": ("4 trees, `leaf=16, sparse=True`", "leaves-4x256-groups"),
}


def front_table(speed: Record, perplexity: dict[str, float | None]) -> str:
    """Time, memory and perplexity of a softmax, the adaptive softmax and trees, from the record of
    benchmarks.table and test perplexities by contestant of benchmarks.trees_study."""
    there = [speed["cpu"][f"training steps, V = {size.classes}"] for size in TRAINING_SIZES]
    last = TRAINING_SIZES[-1]

    def times(contest: dict[str, Any], name: str) -> float | None:
        return ratio(contest["contestants"], UNIT, name)

    def mebibytes(name: str) -> float:
        return there[-1]["contestants"][name]["peak_bytes"] / 2**20

    columns: list[Any] = [("output layer: speed at", lambda name: ROWS[name][0])]
    columns += [
        (f"V = {size.classes:,}", partial(times, contest), _times)
        for size, contest in zip(TRAINING_SIZES, there, strict=True)
    ]
    columns += [
        (f"memory, V = {last.classes:,}", mebibytes, "{:,.0f} MiB".format),
        ("test perplexity", lambda name: perplexity[ROWS[name][1]], decimals(1)),
    ]
    seconds = (median(contest["contestants"][UNIT]["seconds"]) for contest in there)
    unit = ", ".join(f"{1000 * s:,.0f} ms" for s in seconds)
    note = (
        "Speed: training steps of the layer per second (forward, backward, fused AdamW; "
        f"{last.rows} rows of {last.features} features, one core) as a multiple of the first "
        f"row's, whose steps take {unit}. Memory: what the first step adds to the process, "
        "gradients and optimizer state included, parameters not. Test perplexity: Penn Treebank, "
        "V = 10,000, five epochs of a small LSTM, not converged, mean of three seeds. "
        f"{sources(there)}"
    )
    _, _, shown = markdown([table("", ROWS, columns)]).partition("\n\n")  # no title
    return "\n".join([shown, *textwrap.wrap(note, 120, break_on_hyphens=False)])


def _times(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1f}x" if value < 10 else f"{value:.0f}x"


def replaced(text: str, name: str, table: str) -> str:
    """The text with the table between the markers of that name. Raises ValueError unless it has
    both once, in order."""
    begin, end = (f"<!-- {name}: {place} -->" for place in ("begin", "end"))
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        raise ValueError(f"expected one {begin} and one {end} after it")
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def recorded(name: str) -> str:
    """The tables of a page in benchmarks/results."""
    text = (RESULTS / name).read_text()
    return text.partition("\n")[2].partition("\n- ")[0].strip()


COST = re.compile(
    r"^\| (.+): (all classes|top 10|top 1|a draw) \| ([\d.]+) .*\| ([\d.]+) .*\|$", re.M
)


def decoding_costs() -> str:
    """Times of queries for one row and for 32, by head."""
    found = COST.findall((RESULTS / "cpu.md").read_text().partition("\n## Decoding")[2])
    costs = {(head, query): times for head, query, *times in found}
    heads, queries = (list(dict.fromkeys(key[place] for key in costs)) for place in (0, 1))
    columns: list[Any] = [("", str)]
    for place, n in enumerate((1, 32)):
        for query in queries:
            get = partial(lambda place, query, head: costs[head, query][place], place, query)
            columns.append((f"{query}, N = {n}", get))
    _, _, shown = markdown([table("", heads, columns)]).partition("\n\n")
    return shown.strip()


FILLED: dict[str, dict[str, Callable[[], str]]] = {
    "docs/decoding.md": {"costs": decoding_costs, "screened": partial(recorded, "screened.md")},
    "docs/transformers.md": {
        name: partial(recorded, f"{name}.md") for name in ("lm_head", "generation")
    },
}


HEAD_ROW = re.compile(
    r"^(\| (?:[^|]*, )?`([\w.-]+)` \| [^|]+ \|)[^|]*\|[^|]*\|[^|]*\|$", re.MULTILINE
)


def with_head_figures(text: str, speed: Record) -> str:
    """The text with the figures of the heads that were timed, in the rows of their table."""
    contests = [speed["cpu"][name]["contestants"] for name in ("heads", "mixtures")]

    def row(match: re.Match[str]) -> str:
        name = FLAT if match[2] == "F.cross_entropy" else match[2]
        contest = next((contest for contest in contests if name in contest), None)
        if contest is None:
            return match[0]
        time, memory = (ratio(contest, name, FLAT, figure) for figure in ("seconds", "peak_bytes"))
        parameters = contest[name]["parameters"] / 1e6
        return f"{match[1]} {time:.2f} | {memory:.2f} | {parameters:.2f} M |"

    return HEAD_ROW.sub(row, text)


def pages() -> dict[Path, str]:
    """The pages with the figures that are committed."""
    study = results(CONTENDERS, Records(RESULTS / "trees-study.json"))
    speed = json.loads((RESULTS / "cpu.json").read_text())
    perplexity = {result.contender.name: result.mean("test") for result in study}
    shown = front_table(speed, perplexity)
    filled = {page: replaced(page.read_text(), "summary", shown) for page in PAGES}
    for name, tables in FILLED.items():
        text = (ROOT / name).read_text()
        for mark, make in tables.items():
            text = replaced(text, mark, make())
        filled[ROOT / name] = text
    heads = ROOT / "docs" / "heads.md"
    return filled | {heads: with_head_figures(heads.read_text(), speed)}


def main() -> None:
    for page, text in pages().items():
        page.write_text(text)


if __name__ == "__main__":
    main()
