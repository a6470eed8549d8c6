"""The page and the picture of benchmarks.large_vocabulary, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import step_times
from benchmarks.planned import Contender, Records, Result, results, sweep_table
from hstree.lab.comparison import spread
from hstree.lab.report import Report, made_on
from hstree.lm.report import Column, Table, decimals, line_style, new_figure, table

VALID_TOKENS = 24_576
STEPS = (1000, 2000, 4000, 8000, 16000, 30000)
"""Times that have a column in the table, in steps of the first contender."""
INTRODUCTION = f"""\
Validation perplexity (first {VALID_TOKENS:,} tokens) by training time on one core, one LSTM layer
of 200 features, a constant learning rate, one seed. *Time* is the number of steps times the time of
a step, in units of a step with the first head. *Step* is that of the whole model, timed for all
heads in turns in one process: the runs shared the machine with other load, which slows down some
more than others. Between two points of a curve, perplexity is interpolated.

The gradients of the word embeddings are row-sparse: a dense update of them takes most of a step.
The factor of the head's rate was chosen in runs of 60 CPU seconds; the final runs have 500. A
softmax makes too few steps in 60: it has the default of 8. *Memory* is the parameters of the head
and what the first training steps add to the process: gradients, optimizer state and workspaces,
those of the backbone included, which are the same for all. *Rows scored* are the vectors that a
training step multiplies with a context, mean over the training text.
"""
NOTHING = "No run has finished yet."

Curve = Sequence[tuple[float, float]]
"""Time and perplexity, by time."""


def report(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and its picture."""
    step = _steps(records)
    found = _finished(contenders, records, step)
    if not found:
        return Report("Output layers at 100,000 classes and more", [], [NOTHING])
    curves = _results("Validation perplexity by training time", found, step)
    return Report(
        "Output layers at 100,000 classes and more",
        [curves, sweep_table(contenders, records)],
        [f"the text: {records.all()[0]['text']}", "learning rates were tried in the shorter runs"],
        pictures={"": _picture(found, step)},
        introduction=INTRODUCTION,
        appendix="All points: [large-vocabulary.json](large-vocabulary.json), "
        "[large-vocabulary-times.json](large-vocabulary-times.json).",
        made=made_on(records.all()),
    )


def _finished(
    contenders: Sequence[Contender], records: Records, step: Mapping[str, float]
) -> list[Result]:
    """The contenders with a curve and a timed step."""
    found = results(contenders, records)
    return [r for r in found if r.runs[0].get("points") and r.contender.name in step]


def _steps(records: Records) -> dict[str, float]:
    """The time of a step for each name of a contender, over that of the first one."""
    times = step_times.load(records.path)
    return {} if times is None else times["shares"]


def curves(result: Result, step: Mapping[str, float]) -> list[Curve]:
    """The points of each run."""
    tokens = result.settings["batch_size"] * result.settings["bptt"]
    share = step[result.contender.name] / tokens
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
    return "" if set(values) <= {None} else spread(values, 1)


def _results(title: str, found: Sequence[Result], step: Mapping[str, float]) -> Table:
    columns: list[Column] = [("head", lambda r: r.title)]
    columns += [
        (f"time {time:,}", lambda r, time=time: _cell(curves(r, step), time), str) for time in STEPS
    ]
    columns += [
        ("end", lambda r: curves(r, step)[0][-1][1], decimals(1)),
        ("time of the end", lambda r: curves(r, step)[0][-1][0], decimals(0)),
        ("step", lambda r: step[r.contender.name], decimals(2)),
        ("parameters", lambda r: r.runs[0]["head_parameters"] / 1e6, "{:.1f} M".format),
        ("memory", lambda r: r.runs[0]["bytes"], _mebibytes),
        ("rows scored", lambda r: r.runs[0]["rows"], decimals(0)),
    ]
    return table(title, found, columns)


def _mebibytes(size: float | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f} MiB"


def _picture(found: Sequence[Result], step: Mapping[str, float]) -> Any:
    """Validation perplexity against training time."""
    figure = new_figure(7, 4.8)
    axes = figure.subplots()
    for number, result in enumerate(found):
        times, values = zip(*curves(result, step)[0], strict=True)
        axes.plot(times, values, label=result.title, **line_style(number))
    axes.set(xscale="log", yscale="log", xlabel="training time, in steps of the first head")
    axes.set_ylabel("validation perplexity (log scale)")
    axes.yaxis.set_major_locator(FixedLocator([45, 60, 80, 100, 150, 200, 300, 500]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize="small")
    return figure
