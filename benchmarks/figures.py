"""The figures of README.md and docs/, from the records in benchmarks/results.

    python -m benchmarks.figures

fills every place between ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``, and draws
which-head.png. Each name of FIGURES has one place. The programs that measure make the pages of
results from their records, so figures are read from the tables of these pages; those that a page
rounds too much are computed from cpu.json and gpu.json.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import CONTESTANTS
from benchmarks.table import ratio, time
from hstree.lm.report import new_figure, picture

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PLACE = re.compile(r"<!-- ([^<>\n]+): begin -->(.*?)<!-- \1: end -->", re.DOTALL)

Figure = Callable[[str], str]
"""What stands in a place, from what stood there before."""


# ---- tables of the pages of results


@dataclass(frozen=True)
class Table:
    """A table of a page; ``title``: the line in bold face above it."""

    heading: str
    title: str
    header: list[str]
    alignment: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        lines = (self.header, self.alignment, *self.rows)
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def row(self, first: str) -> dict[str, str]:
        """The cells by column of the row with this first cell."""
        (found,) = (row for row in self.rows if row[0].replace("`", "") == first.replace("`", ""))
        return dict(zip(self.header, found, strict=True))

    def part(self, columns: str) -> Table:
        """Some columns, by their header, ``head | valid | test``."""
        kept = [self.header.index(column) for column in columns.split(" | ")]
        lines = (self.header, self.alignment, *self.rows)
        header, alignment, *rows = ([line[place] for place in kept] for line in lines)
        return Table(self.heading, self.title, header, alignment, rows)

    def only(self, first: Collection[str]) -> Table:
        """The rows with these first cells, in this order."""
        rows = [next(row for row in self.rows if row[0] == name) for name in first]
        return Table(self.heading, self.title, self.header, self.alignment, rows)


@cache
def tables(page: str) -> tuple[Table, ...]:
    """The tables of a page in benchmarks/results."""
    found, lines = [], []
    heading = bold = ""
    for line in [*(RESULTS / page).read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line[1:-1].split("|")])
            continue
        if lines:
            found.append(Table(heading, bold, lines[0], lines[1], lines[2:]))
            lines = []
        if line.startswith("#"):
            heading, bold = line.lstrip("# "), ""
        elif line.startswith("**"):
            bold = line.strip("*")
    return tuple(found)


def named(page: str, title: str = "") -> Table:
    """The first table of a page whose heading or title contains this text."""
    return next(table for table in tables(page) if title in f"{table.heading}: {table.title}")


def number(text: str) -> float:
    """The number at the beginning of a cell: of ``99.3 ± 0.1``, ``0.50 (50 ms)``, ``14.6%``."""
    found = re.match(r"[-+]?[\d,]*\.?\d+", text)
    assert found, text
    return float(found[0].replace(",", ""))


# ---- figures of one record


def cell(page: str, title: str, row: str, column: str, form: str | None = None) -> Figure:
    """A cell without the spread of a mean; ``form``: how its number is shown."""

    def figure(_: str) -> str:
        text = named(page, title).row(row)[column].partition(" ±")[0]
        return text if form is None else format(number(text), form)

    return figure


def speed(model: str) -> Figure:
    """How many times as fast greedy decoding is with a screen; without the spread over prompts."""
    of = cell("generation.md", model, "accelerate_lm_head(model, tokens)", "greedy")
    return lambda text: of(text).partition(" (")[0]


def whole(page: str, title: str = "", columns: str = "", rows: Collection[str] = ()) -> Figure:
    """A table, or some of its columns and rows."""

    def figure(_: str) -> str:
        table = named(page, title)
        table = table.only(rows) if rows else table
        return str(table.part(columns) if columns else table)

    return figure


def study(page: str, title: str, columns: str, rows: Collection[str] = ()) -> Figure:
    """Some columns and rows of a table of a study, without settings that most rows share."""
    shared = re.compile(r", C = [\d,]*\d|, weight decay [\d.]+|, 1,024 in the head| \(sweep.*\)")
    of = whole(page, title, columns, rows)
    return lambda old: shared.sub("", of(old))


def all_of(page: str, columns: str = "") -> Figure:
    """The tables of a page, or some of their columns, with their titles."""

    def shown(table: Table) -> str:
        return f"**{table.title}**\n\n{table.part(columns) if columns else table}"

    return lambda _: "\n\n".join(shown(table) for table in tables(page))


def bounds(values: Collection[float], form: str) -> str:
    return f"{format(min(values), form)} to {format(max(values), form)}"


# ---- figures of several records

AVX2 = "cpu-avx2.json"
UNIT, FLAT = "linear", "F.linear + F.cross_entropy"
SIZES = (10_000, 33_278, 100_000)
# Contestants of the training steps, as README calls them, with the trees study's rows.
ROWS = {
    UNIT: ("`nn.Linear` + `F.cross_entropy`", "Softmax"),
    "softmax": ("`Softmax`", "Softmax"),
    "adaptive": ("`nn.AdaptiveLogSoftmaxWithLoss`", "AdaptiveSoftmax, 1,024 in the head"),
    "sampled": ("`SampledSoftmax`, 128 negatives", "SampledSoftmax, 128 negatives"),
    "forest, sampled": (
        "`ForestSoftmax`, 512 negatives",
        "ForestSoftmax, 4 trees, C = 256, 512 negatives, weight decay 0.1",
    ),
    "trees": ("`TreeEnsemble`, 4 trees", "TreeEnsemble, 4 trees, C = 256, weight decay 0.1"),
}


def perplexity(row: str) -> float:
    """Test perplexity of a row of the trees study."""
    return number(named("trees-study.md", "Results").row(row)["test"])


@cache
def contests(file: str = "cpu.json") -> dict[str, dict[str, Any]]:
    """The contests on a CPU by name."""
    found: dict[str, dict[str, Any]] = json.loads((RESULTS / file).read_text())["cpu"]
    return found


def times_of(name: str, of: str, to: str, figure: str = "seconds", file: str = "cpu.json") -> float:
    """A figure of a contestant over that of another one."""
    found = ratio(contests(file)[name]["contestants"], of, to, figure)
    assert found is not None, (name, of)
    return found


def step_share(size: int, name: str, file: str = "cpu.json") -> float:
    """The time of a training step over that of a linear layer."""
    return times_of(f"training steps, V = {size}", name, UNIT, file=file)


def summary(_: str) -> str:
    """Time and memory of output layers, with AVX-512 and with AVX2."""
    size, *_, most = SIZES
    largest = contests()[f"training steps, V = {most}"]["contestants"]
    header = ["head", f"time, V = {most:,}", "with AVX2", f"memory, V = {most:,}"]
    header.append(f"time, V = {size:,}")
    rows = []
    for name, (label, _) in ROWS.items():
        memory = f"{largest[name]['peak_bytes'] / 2**20:,.0f} MiB"
        shares = step_share(most, name), step_share(most, name, AVX2), step_share(size, name)
        times = [f"{share:.{2 if share > 0.1 else 3}f}" for share in shares]
        rows.append([label, *times[:2], memory, times[2]])
    return str(Table("", "", header, ["---", *["---:"] * 4], rows))


def one_line(_: str) -> str:
    """The loss of a linear layer beside compiled and fused ones, on a CPU and a GPU."""
    there = contests()[f"training steps, V = {SIZES[-1]}"]["contestants"]
    rows = []
    for label, here, gpu in (
        ("plain", UNIT, "eager"),
        ("`torch.compile`", "linear, compiled", "compiled"),
        ("Liger", None, "liger"),
        ("hstree", "linear, deferred", "softmax"),
    ):
        cells = ["not on a CPU", ""]
        if here is not None:
            memory = f"{there[here]['peak_bytes'] / 2**20:,.0f} MiB"
            both = (f"{step_share(SIZES[-1], here, of):.2f}" for of in ("cpu.json", AVX2))
            cells = [" / ".join(both), memory]
        bytes_ = on_gpu()[f"benchmarks/{GPU_SETTINGS[0]}/{gpu}"]["peak_bytes"]
        time_ = gpu_step(GPU_SETTINGS[0], gpu)
        rows.append([label, *cells, f"{time_:.2f}", f"{bytes_ / 2**30:.1f} GiB"])
    header = ["loss", "CPU: time, AVX-512 / AVX2", "CPU: memory", "H200: time", "H200: memory"]
    return str(Table("", "", header, ["---", *["---:"] * 4], rows))


def which_head() -> bytes:
    """The times of the table of :func:`summary`, against the number of classes."""
    figure = new_figure(9, 3.5)
    axes = figure.subplots()
    for name, (label, row) in ROWS.items():
        shown = f"{label.replace('`', '')}: {perplexity(row):.1f}"
        axes.plot(SIZES, [step_share(size, name) for size in SIZES], "o-", label=shown)
    axes.set(
        xscale="log", yscale="log", xlabel="number of classes", ylabel="time of a step, linear is 1"
    )
    axes.set_xticks(SIZES, [f"{size:,}" for size in SIZES], minor=False)
    axes.minorticks_off()
    axes.legend(bbox_to_anchor=(1, 1), fontsize="x-small")
    return picture(figure)


def heads(old: str) -> str:
    """The table of heads with its figures: rows of heads that were timed get those of their record,
    by the last name in the first cell, before the formula in the last one; the others stay."""
    kinds = ("cpu.json", AVX2)
    by_name = {
        of: [
            " / ".join(f"{times_of(name, of, FLAT, file=kind):.2f}" for kind in kinds),
            f"{times_of(name, of, FLAT, 'peak_bytes'):.2f}",
            f"{figures['parameters'] / 1e6:,.2f} M",
        ]
        for name in ("heads", "default trees", "mixtures")
        for of, figures in contests()[name]["contestants"].items()
    }
    lines = []
    for line in old.strip().splitlines():
        first, *_ = cells = line.strip("| ").split(" | ")
        key = (re.findall(r"`([^`]+)`", first) or [""])[-1].replace("F.cross_entropy", FLAT)
        if key in by_name:
            line = f"| {' | '.join([first, *by_name[key], cells[-1]])} |"
        lines.append(line)
    return "\n".join(lines)


DECODING = ("decoding, N = 1", "decoding, N = 32")
DECODING_ROWS = {
    "softmax": "`Softmax`",
    "C = 256, T = 4 (default)": "`TreeEnsemble`, 4 trees (default)",
    "C = 256, T = 1": "`TreeEnsemble`, one tree",
    "C = 256, binary below, T = 4": "`TreeEnsemble`, 4 trees, binary below the root",
    "binary, T = 1": "`TreeEnsemble`, one binary tree",
}


def decoding_costs(_: str) -> str:
    """Times of queries for one row and for 32, by head."""
    kinds = [kind.split(": ") for kind in contests()[DECODING[0]]["contestants"]]
    queries = list(dict.fromkeys(query for _, query in kinds))
    unit = f"softmax: {queries[0]}"
    shown = []
    for name in DECODING:
        rows = [
            [label, *(f"{times_of(name, f'{head}: {query}', unit):.2f}" for query in queries)]
            for head, label in DECODING_ROWS.items()
        ]
        part = Table("", "", ["", *queries], ["---"] + ["---:"] * len(queries), rows)
        one = time(contests()[name], unit).partition("(")[2].rstrip(")")
        shown.append(f"**{name.partition(', ')[2]}; 1.00 is {one}**\n\n{part}")
    return "\n\n".join(shown)


def all_classes(_: str) -> str:
    trees, softmax = "C = 256, T = 4 (default): all classes", "softmax: all classes"
    return bounds([times_of(name, trees, softmax) for name in DECODING], ".2f")


def forest_price(_: str) -> str:
    """How much higher the perplexity of a forest over all classes is, after long training."""
    rows = named("transformer-study.md", "After 10,000 steps")
    forest, softmax = (number(rows.row(name)["valid"]) for name in (EVERY, "Softmax"))
    return f"{forest / softmax - 1:.0%}"


LABEL_ROWS = {
    "linear": "`nn.Linear`",
    "adaptive": "`AdaptiveSoftmax`",
    "sampled-512": "`SampledSoftmax`, 512 negatives",
    "sampled-2048": "`SampledSoftmax`, 2,048 negatives",
    "trees": "`TreeEnsemble.from_counts`, 4 trees",
    "clustered-tree": "`TreeEnsemble.from_vectors`, one tree",
    "clustered-trees": "`TreeEnsemble.from_vectors`, 4 trees",
}


def beside_napkin(_: str) -> str:
    """Precision of heads and of napkinXC on three kinds of data, in equal time."""
    kinds = "rare diseases", "by the topics", "of each label"
    tables = [named("recommenders.md", kind) for kind in kinds]
    rows = []
    for name, *_ in tables[0].rows:
        found = [table.row(name.strip("`")) for table in tables]
        rows.append([name, *(row["precision@1"] for row in found), found[0]["ms a row"]])
    header = ["head", "precision@1, diseases", "topics", "own words", "ms a row, diseases"]
    return str(Table("", "", header, ["---"] + ["---:"] * 4, rows))


def labels(_: str) -> str:
    """Precision of heads with 100,000 labels, one and five a row, in equal time."""
    five, one = (named("classification.md", f"100,000 labels, {n}") for n in ("five", "one"))
    rows = []
    for name, label in LABEL_ROWS.items():
        precision = (table.row(name)["precision@1"] for table in (five, one))
        rows.append([label, *precision, one.row(name)["peak MiB"]])
    header = ["head", "precision@1, five labels", "one label", "peak MiB"]
    return str(Table("", "", header, ["---"] + ["---:"] * 3, rows))


def one_dnn(_: str) -> str:
    """How many times as fast the steps of heads are."""
    rows = named("onednn.md").part("step | ratio").rows
    return bounds([1 / number(ratio) for step, ratio in rows if step != "linear"], ".1f")


def model_classes(_: str) -> str:
    page = (RESULTS / "models.md").read_text(encoding="utf-8")
    outcomes = Counter(row[1] for row in named("models.md").rows)
    right = outcomes["loss without logits"] + outcomes["reads its logits"]
    version = re.findall(r"transformers (\d+\.\d+)", page)[0]
    return (
        f"{sum(outcomes.values())} causal and image-text classes of transformers {version}: "
        f"{right} are right, {outcomes['refused']} are refused, "
        f"{outcomes['needs more than tokens']} do not run on tokens alone, "
        f"{outcomes['not built here']} needs a package that was not there"
    )


GPU_SETTINGS = ("4096x128k", "2304x256k", "768x50k")
GPU_ROWS = (
    *("eager", "compiled", "liger", "cut", "softmax", "forest", "plif", "sampled"),
    *("forest-sampled", "adaptive", "leaves", "leaves-dense", "wide-binary", "huffman-4"),
)


@cache
def on_gpu() -> dict[str, Any]:
    entries: dict[str, Any] = json.loads((RESULTS / "gpu.json").read_text())["entries"]
    return entries


def gpu_step(setting: str, name: str) -> float | None:
    """Median time of a step over that of the flat loss; None: not measured."""
    there, flat = (on_gpu().get(f"benchmarks/{setting}/{key}", {}) for key in (name, "eager"))
    if not there.get("seconds"):
        return None
    return float(median(there["seconds"]["both"]) / median(flat["seconds"]["both"]))


def gpu_steps(_: str) -> str:
    """Steps on a GPU as multiples of the flat loss's, with their memory."""

    def cell(setting: str, name: str) -> str:
        if (time := gpu_step(setting, name)) is None:
            return "not measured"
        memory = on_gpu()[f"benchmarks/{setting}/{name}"]["peak_bytes"] / 2**30
        return f"{time:.{2 if time > 0.1 else 3}f} ({memory:.1f})"

    page = (RESULTS / "gpu.md").read_text(encoding="utf-8")
    sizes = re.findall(r"^N = (\d+), D = (\d+), V = (\d+)", page, re.MULTILINE)
    header = [
        ", ".join(f"{k} = {int(n):,}" for k, n in zip("NDV", size, strict=True)) for size in sizes
    ]
    rows = [
        [CONTESTANTS[name].title, *(cell(setting, name) for setting in GPU_SETTINGS)]
        for name in GPU_ROWS
    ]
    table = str(Table("", "", ["output layer", *header], ["---"] + ["---:"] * 3, rows))
    return table.replace("`hstree.", "`").replace(" and the batch's targets", "")


def tree_rates(_: str) -> str:
    """Validation perplexities of four trees by the factor on the learning rate."""
    title = "by the value of a setting"
    row = named("trees-study.md", title).row(TREES)
    return row["value: perplexity"]


def visits(library: str, features: int) -> Figure:
    """Time of a node visit over the library's."""
    name = f"{library}, D = {features}"
    return lambda _: f"{times_of(name, 'hstree', library, 'visit'):.2f}"


def study_times(name: str) -> Figure:
    """The time of a step at 159,236 words."""
    file = RESULTS / "large-vocabulary-times.json"
    return lambda _: f"{json.loads(file.read_text())['shares'][name]:.1f}"


# ---- figures of the laboratory


def _lab(page: str, title: str = "", columns: str = "") -> Figure:
    return whole(f"laboratory/{page}.md", title, columns)


PAIRS = "models | difference of means | 95% interval | Welch p | Welch p, Holm"
EFFECTIVE = " | ".join(
    f"effective rank, epsilon {epsilon}" for epsilon in ("0.001", "0.0001", "1e-05")
)
MODES = "Mode matching (% of contexts), alpha = 0.1,"
CORRELATION = "laboratory/correlation.md", "", "all points"
WITHIN_SEEDS = "laboratory/gss-rates/correlation.md", "", "all points"
LABORATORY: dict[str, Figure] = {
    "function slope": cell("laboratory/function.md", "Function", "plif", "slope of the best line"),
    "function deviation": cell("laboratory/function.md", "Function", "plif", "SD from that line"),
    "PLIF start, random": cell("laboratory/plif-start.md", "", "plif, slope_std=1.0", "test"),
    "PLIF start, equal": cell("laboratory/plif-start.md", "", "plif, slope_std=0.0", "test"),
    "trees, mean": cell("laboratory/tree.md", "", "mean of the trees' losses", "loss", ".2f"),
    "trees, mixture": cell("laboratory/tree.md", "", "mixture with equal weights", "loss", ".2f"),
    "softmax modes": cell("laboratory/synthetic.md", MODES, "softmax", "D=8"),
    "PLIF modes": cell("laboratory/synthetic.md", MODES, "plif", "D=8"),
    "dense zeros": cell("laboratory/jacobian.md", "", "dense", "zero"),
    "mixture zeros": lambda _: next(
        row[5] for row in named("laboratory/jacobian.md").rows if row[1] == "16"
    ),
    "ranks": _lab("rank", columns=f"matrix | Press rank | {EFFECTIVE}"),
    "grid correlation": cell(*CORRELATION, "Pearson"),
    "rates correlation": cell(*WITHIN_SEEDS, "Pearson"),
    "rates interval": cell(*WITHIN_SEEDS, "95% interval"),
    "tuned differences": _lab("significance-tuned/significance", "Unpaired", PAIRS),
}

# ---- the places

FOREST = "`ForestSoftmax`, 4 trees, C = 256, 512 negatives"
SAMPLED = "`SampledSoftmax`, 512 negatives"
TREES = "`TreeEnsemble`, 4 trees, C = 256"
TAIL = ", all classes in the last tenth"
OCCURRING = ", over the 21,819 subwords that occur"
EVERY = "`ForestSoftmax`, 4 trees, C = 256, all classes"


def _transformer(steps: str, row: str, column: str = "valid") -> Figure:
    return cell("transformer-study.md", f"After {steps} steps", row, column)


def _equal_time(row: str) -> Figure:
    return cell("transformer-study.md", "In the time of 1,600 steps", row, "valid")


LONG_ROWS = (
    *("`Softmax`", SAMPLED, SAMPLED + TAIL, f"{SAMPLED}, all classes in the last 40%"),
    *(FOREST + TAIL, EVERY),
)
EQUAL_TIME = "head | valid | steps | time | seeds"


def _labels(title: str, row: str) -> Figure:
    return cell("classification.md", title, row, "precision@1")


QUALITY = "head | test | valid | head step | parameters"
QUALITY_ROWS = (
    "`Softmax`",
    f"{SAMPLED}, weight decay 0.1",
    f"{FOREST}, weight decay 0.1",
    f"{EVERY}, weight decay 0.1",
    f"{TREES}, weight decay 0.1",
    "`TreeEnsemble`, one tree, C = 256",
    "`TreeEnsemble`, one binary tree, C = 256",
    "`MixtureOfSoftmaxes`, K = 5, weight decay 0.1",
    "`AdaptiveSoftmax`, 1,024 in the head",
    "`Softmax`, tied, weight decay 0.1 (sweep not finished)",
    f"{SAMPLED}, tied, weight decay 0.1",
    f"{FOREST}, tied, weight decay 0.1",
    f"{TREES}, tied, weight decay 0.1",
)
CHANGES = (
    "Copies of one tree instead of one",
    "Copies over different halves of the features",
    "Four different trees instead of one",
    "Eight trees over halves, parameters of four",
    "A learned gate for four trees",
    "Four clustered trees instead of a softmax",
    "`ForestSoftmax` of four trees instead of a softmax",
    "`ForestSoftmax`: 16 trees instead of four",
    "`ForestSoftmax`: copies of one tree instead",
    "`ForestSoftmax`: random clusters instead of learned ones",
)
CURVES = "head | time 16,000 | time 4,000 | time 1,000 | step"
SCREEN = "chosen: R = 288, int4, n = 256"
BEST_WORD = (
    " | V = 49,152, D = 576, N = 1 | V = 262,144, D = 640, N = 1 | V = 128,256, D = 4,096, N = 1"
)
SCREENED = " | bytes | best word | overlap | time / float32, N = 1"
SCREENED_ROWS = (
    "product, float32",
    "product, bfloat16",
    "product, int8 (torchao, compiled)",
    "12,288 words",
    "FAISS IVF1024,Flat, nprobe = 128",
    "FAISS HNSW32, efSearch = 512",
    SCREEN,
    "no contexts: R = 576, int4, n = 256",
)
README: dict[str, Figure] = {
    "one line": one_line,
    "trees equal time": _equal_time(TREES),
    "sampled equal time": _equal_time(SAMPLED + TAIL),
    "softmax 1,600": _transformer("1,600", "Softmax"),
    "softmax occurring": _equal_time(f"Softmax{OCCURRING}"),
    "sampled occurring": _equal_time(SAMPLED + OCCURRING + TAIL),
    "sampled tail": _transformer("10,000", SAMPLED + TAIL),
    "softmax 10,000": _transformer("10,000", "Softmax"),
    "gpu sampled": lambda _: f"{gpu_step(GPU_SETTINGS[0], 'sampled'):.2g}",
    "step of SmolLM2": cell("lm_head.md", "lm_head", "replace_lm_head(model)", "time of a step"),
    "step with AVX2": cell("lm_head-avx2.md", "", "replace_lm_head(model)", "time of a step"),
    "greedy": speed("SmolLM2"),
    "greedy large": speed("Shape of Gemma"),
    "five labels sampled": _labels("100,000 labels, five", "sampled-512"),
    "five labels tree": _labels("100,000 labels, five", "clustered-tree"),
    "trees step": lambda _: f"{step_share(SIZES[-1], 'trees'):.2g}",
    "all classes": all_classes,
    "full forest": lambda _: f"{perplexity(f'{EVERY}, weight decay 0.1'):.1f}",
    "PTB softmax": lambda _: f"{perplexity('Softmax'):.1f}",
    "forest price": forest_price,
}
DOCS: dict[str, Figure] = {
    "oneDNN": one_dnn,
    "model classes": model_classes,
    "napkinXC": beside_napkin,
    "labels": labels,
    "summary": summary,
    "quality": study("trees-study.md", "Results", QUALITY, QUALITY_ROWS),
    "large vocabulary": study("large-vocabulary.md", "by training time", CURVES),
    "dense embedding": study_times("sampled-in-batch-dense"),
    "decoding": decoding_costs,
    "screened": whole("screened.md", "SmolLM2", SCREENED, SCREENED_ROWS),
    "ensemble changes": whole("randomized.md", "Change of", rows=CHANGES),
    "gpu": gpu_steps,
    "gpu screened": whole("gpu.md", "The best word", BEST_WORD),
    "heads": heads,
    "equal time": study("transformer-study.md", "In the time of 1,600 steps", EQUAL_TIME),
    "equal time, long": study("transformer-study.md", "In the time of 10,000 steps", EQUAL_TIME),
    "transformer": study(
        "transformer-study.md", "After 10,000 steps", "head | valid | step / softmax", LONG_ROWS
    ),
    "lm_head": all_of("lm_head.md"),
    "gensim 400": visits("gensim", 400),
    "gensim 100": visits("gensim", 100),
    "fastText 400": visits("fasttext", 400),
    "fastText 100": visits("fasttext", 100),
    "generation": all_of("generation.md"),
    "shapes": whole("trees-study.md", "of trees of two levels"),
    "tree rates": tree_rates,
    "half of the features": lambda _: named("subset-sizes.md").rows[1][-1].partition(" /")[0],
    "a quarter": lambda _: named("subset-sizes.md").rows[0][-1].partition(" /")[0],
}
FIGURES = README | DOCS | LABORATORY


def filled(text: str, figures: dict[str, Figure] = FIGURES) -> str:
    """The text with the figures in its places; those on lines of their own remain there."""

    def replace(place: re.Match[str]) -> str:
        name, old = place.groups()
        around = "\n" if old.startswith("\n") else ""
        new = figures[name](old).strip("\n")
        return f"<!-- {name}: begin -->{around}{new}{around}<!-- {name}: end -->"

    return PLACE.sub(replace, text)


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if text != (new := filled(text)):
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    (RESULTS / "which-head.png").write_bytes(which_head())


if __name__ == "__main__":
    main()
