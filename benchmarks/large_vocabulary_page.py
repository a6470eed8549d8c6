"""The page and the picture of benchmarks.large_vocabulary, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.studies import times as times_of
from benchmarks.studies.page import Result, mean_and_spread, results, row, sweep_rows, table
from benchmarks.studies.plan import Contender
from benchmarks.studies.records import Records, made_on
from hstree.lm._pictures import line_style, new_figure
from hstree.lm._pictures import picture as rendered

PICTURE = "large-vocabulary.png"
STEPS, LONG_STEPS = (1000, 2000, 4000, 6000, 8000), (4000, 8000, 16000, 32000)
"""Times that have a column in the tables, in steps of the first contender."""
INTRODUCTION = """\
# Output layers at 100,000 classes and more

Validation perplexity (first 20,000 tokens) by training time on one core, one LSTM layer of 200
features, a constant learning rate. Two heads have three seeds: mean ± standard deviation over the
runs that reach the time, without ± if only one does; *end* is that of the first seed. The others
have one seed. *Time* is the number of steps times the time of a step, in units of a step with the
sampled softmax. *Step* is that of the whole model, timed for all heads in turns in one process: the
runs shared the machine with other load, which slows down some more than others. Between two points
of a curve, perplexity is interpolated.

The gradients of the word embeddings are row-sparse, but in the last row: a dense update of them
takes most of a step. The factor of the head's rate was chosen in runs of 60 CPU seconds; the final
runs have 240, and longer ones 1,200. A softmax makes too few steps in 60: it has the default of 8.
The text is the documentation on one machine, pieces of all documents mixed
([large_text.py](../large_text.py)). *Memory* is the parameters of the head and what the first
training steps add to the process: gradients, optimizer state and workspaces, those of the backbone
included, which are the same for all. *Rows scored* are the vectors that a training step multiplies
with a context, mean over the training text.
"""
NOTHING = "No run has finished yet.\n"

Curve = Sequence[tuple[float, float]]
"""Time and perplexity, by time."""


def page(contenders: Sequence[Contender], records: Records) -> str:
    """The page in Markdown."""
    step = _steps(records)
    found = _finished(contenders, records, step)
    if not found:
        return f"{INTRODUCTION}\n{NOTHING}"
    text = records.all()[0]["text"]
    usual = [result for result in found if not _long(result)]
    long = [result for result in found if _long(result)]
    lines = [
        INTRODUCTION,
        f"The text: {text}.",
        "",
        *_table(usual, step),
        f"![Validation perplexity by training time]({PICTURE})",
        "",
        *_verdict(usual, step),
    ]
    if long:
        lines += ["## Longer runs", "", *_long_table(long, step)]
    lines += [
        "## Learning rates tried",
        "",
        "Validation perplexity after the shorter runs by the factor on the head's learning rate.",
        "",
        *table(["head", "setting", "value: perplexity"], sweep_rows(contenders, records), left=3),
        "## Made by",
        "",
        "    python -m benchmarks.large_text --save FOLDER",
        "    python -m benchmarks.large_vocabulary --data FOLDER",
        "    python -m benchmarks.large_vocabulary --data FOLDER --times",
        "",
        made_on(records.all()),
        "",
        "All points: [large-vocabulary.json](large-vocabulary.json), "
        "[large-vocabulary-times.json](large-vocabulary-times.json).",
    ]
    return "\n".join(lines) + "\n"


def _finished(
    contenders: Sequence[Contender], records: Records, step: Mapping[str, float]
) -> list[Result]:
    """The contenders with a curve and a timed step."""
    found = results(contenders, records)
    return [r for r in found if r.runs[0].get("points") and _head(r) in step]


def _long(result: Result) -> bool:
    """Whether these runs take over the settings of others, and are longer."""
    return result.contender.like is not None


def _head(result: Result) -> str:
    """The name under which the steps of a contender are timed."""
    return result.contender.like or result.contender.name


def _steps(records: Records) -> dict[str, float]:
    """The time of a step for each name of a contender, over that of the first one."""
    times = times_of.load(records.path)
    return {} if times is None else times["shares"]


def curves(result: Result, step: Mapping[str, float]) -> list[Curve]:
    """The points of each run."""
    tokens = result.settings["batch_size"] * result.settings["bptt"]
    share = step[_head(result)] / tokens
    return [[(p["tokens"] * share, p["valid"]) for p in run["points"]] for run in result.runs]


def perplexity_at(points: Curve, time: float) -> float | None:
    """The perplexity at a time, interpolated in the logarithms of both; None outside the curve."""
    times, perplexities = zip(*points, strict=True)
    if not times[0] <= time <= times[-1]:
        return None
    return float(np.exp(np.interp(np.log(time), np.log(times), np.log(perplexities))))


def _cell(curves: Sequence[Curve], time: float) -> str:
    """Mean ± standard deviation of the perplexity at a time, over the curves that reach it."""
    values = [perplexity_at(points, time) for points in curves]
    known = [value for value in values if value is not None]
    return mean_and_spread(known) if known else ""


def _table(found: Sequence[Result], step: Mapping[str, float]) -> list[str]:
    rows = []
    for result in found:
        run, runs = result.runs[0], curves(result, step)
        rows.append(
            row([
                result.title,
                *(_cell(runs, time) for time in STEPS),
                f"{runs[0][-1][1]:.1f}",
                f"{runs[0][-1][0]:,.0f}",
                f"{step[_head(result)]:.2f}",
                f"{run['head_parameters'] / 1e6:.1f} M",
                "" if run["bytes"] is None else f"{run['bytes'] / 2**20:,.0f} MiB",
                f"{run['rows']:,.0f}",
            ])
        )  # fmt: skip
    columns = [f"time {time:,}" for time in STEPS]
    more = ["end", "time of the end", "step", "parameters", "memory", "rows scored"]
    return table(["head", *columns, *more], rows)


def _long_table(found: Sequence[Result], step: Mapping[str, float]) -> list[str]:
    rows = []
    for result in found:
        runs = curves(result, step)
        end, last = runs[0][-1]
        cells = [_cell(runs, time) for time in LONG_STEPS]
        rows.append(row([result.title, *cells, f"{last:.1f}", f"{end:,.0f}"]))
    columns = [f"time {time:,}" for time in LONG_STEPS]
    return table(["head", *columns, "end", "time of the end"], rows)


def _verdict(found: Sequence[Result], step: Mapping[str, float]) -> list[str]:
    """At how many points of the other curves each kind of trees is below."""
    trees = [r for r in found if r.settings["head"] == "trees"]
    others = [r for r in found if r.settings["head"] != "trees"]
    if not trees or not others:
        return []
    rows = [row([r.title, *(_below(r, other, step) for other in others)]) for r in trees]
    return [
        "## Target: below the others at every second of training",
        "",
        "Points of the other curves, within the time of both, at which the trees are below, in "
        "runs of the same seed.",
        "",
        *table(["trees", *(other.title for other in others)], rows),
    ]


def _below(result: Result, other: Result, step: Mapping[str, float]) -> str:
    pairs = [
        (perplexity_at(own, time), theirs)
        for own, those in zip(curves(result, step), curves(other, step), strict=False)
        for time, theirs in those
    ]
    known = [(mine, theirs) for mine, theirs in pairs if mine is not None]
    return f"{sum(mine < theirs for mine, theirs in known)} of {len(known)}"


def pictures(contenders: Sequence[Contender], records: Records) -> dict[str, bytes]:
    """The picture by name of its file; none before a run has finished."""
    step = _steps(records)
    found = [r for r in _finished(contenders, records, step) if not _long(r)]
    if not found:
        return {}
    figure = new_figure(10, 4.8)
    axes = figure.subplots(1, 2, sharey=True)
    for number, result in enumerate(found):
        run, style = result.runs[0], line_style(number)
        times, values = zip(*curves(result, step)[0], strict=True)
        axes[0].plot(times, values, label=result.title, **style)
        if run["bytes"] is not None:
            fill = "full" if style["linestyle"] == "-" else "none"
            dot = {"color": style["color"], "fillstyle": fill}
            axes[1].plot(run["bytes"] / 2**20, values[-1], "o", **dot)
    first = found[0].title.split(",")[0]
    axes[0].set(xscale="log", yscale="log", xlabel=f"training time, in steps of the {first}")
    axes[0].set_ylabel("validation perplexity (log scale)")
    axes[0].yaxis.set_major_locator(FixedLocator([80, 100, 150, 200, 300, 500]))
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[1].set(xscale="log", xlabel="memory of the head in training, MiB")
    for panel in axes:
        panel.grid(alpha=0.3, which="both")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return {PICTURE: rendered(figure)}
