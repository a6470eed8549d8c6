"""The page and the picture of benchmarks.large_vocabulary, from its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.studies.page import Result, results, row, sweep_rows, table
from benchmarks.studies.plan import Contender
from benchmarks.studies.records import Records, made_on
from hstree._figures import line_style, new_figure
from hstree._figures import picture as rendered

PICTURE = "large-vocabulary.png"
SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the training time that have a column in the table."""
INTRODUCTION = """\
# Output layers at 100,000 classes and more

Validation perplexity (first 10,000 tokens) against CPU seconds of training on one core, one LSTM
layer of 200 features, a constant learning rate, one seed. The factor of the head's rate was chosen
in shorter runs; trees of other shapes have that of three levels. A softmax makes too few steps for
that, a few seconds each: it has the default of 8, and is left out where it has no row below. The
text is the documentation on one machine ([large_text.py](../large_text.py)). *Memory* is the
parameters of the head and what the first training steps add to the process: gradients, optimizer
state and workspaces, those of the backbone included, which are the same for all. *Rows scored* are
the vectors that a training step multiplies with a context, mean over the training text.
"""
NOTHING = "No run has finished yet.\n"


def page(contenders: Sequence[Contender], records: Records) -> str:
    """The page in Markdown."""
    found = _finished(contenders, records)
    if not found:
        return f"{INTRODUCTION}\n{NOTHING}"
    text = records.all()[0]["text"]
    lines = [
        INTRODUCTION,
        f"The text: {text}.",
        "",
        *_table(found),
        f"![Validation perplexity against seconds of training]({PICTURE})",
        "",
        *_verdict(found),
        "## Learning rates tried",
        "",
        "Validation perplexity after the shorter runs by the factor on the head's learning rate.",
        "",
        *table(["head", "setting", "value: perplexity"], sweep_rows(contenders, records), left=3),
        "## Made by",
        "",
        "    python -m benchmarks.large_text --save FOLDER",
        "    python -m benchmarks.large_vocabulary --data FOLDER",
        "",
        made_on(records.all()),
        "",
        "All points: [large-vocabulary.json](large-vocabulary.json).",
    ]
    return "\n".join(lines) + "\n"


def _finished(contenders: Sequence[Contender], records: Records) -> list[Result]:
    return [r for r in results(contenders, records) if r.runs[0].get("points")]


def curve(result: Result) -> list[Mapping[str, Any]]:
    """The points of a run, the last one at the end of its time."""
    run = result.runs[0]
    points = [point for point in run["points"] if point["seconds"] < result.settings["seconds"]]
    return [*points, {"seconds": result.settings["seconds"], "valid": run["valid"]}]


def perplexity_at(points: Sequence[Mapping[str, Any]], seconds: float) -> float | None:
    """The perplexity of the last point up to a time; None before the first."""
    before = [point["valid"] for point in points if point["seconds"] <= seconds]
    return before[-1] if before else None


def _table(found: Sequence[Result]) -> list[str]:
    total = found[0].settings["seconds"]
    times = [share * total * 1.02 for share in SHARES]  # a point comes after the end of its step
    rows = []
    for result in found:
        run = result.runs[0]
        values = [perplexity_at(curve(result), seconds) for seconds in times]
        last = run["points"][-1]
        rows.append(
            row([
                result.title,
                *("" if value is None else f"{value:.1f}" for value in values),
                f"{last['tokens'] / last['seconds']:,.0f}",
                f"{run['head_parameters'] / 1e6:.1f} M",
                "" if run["bytes"] is None else f"{run['bytes'] / 2**20:,.0f} MiB",
                f"{run['rows']:,.0f}",
            ])
        )  # fmt: skip
    columns = [f"after {share * total:,.0f} s" for share in SHARES]
    more = ["tokens a second", "parameters", "memory", "rows scored"]
    return table(["head", *columns, *more], rows)


def _verdict(found: Sequence[Result]) -> list[str]:
    """Whether the best trees are below every other head at every point after their first."""
    trees = [r for r in found if r.settings["head"] == "trees"]
    others = [r for r in found if r.settings["head"] != "trees"]
    if not trees or not others:
        return []
    best = min(trees, key=lambda r: r.runs[0]["valid"])
    rows = []
    for other in others:
        at = [(point["valid"], point["seconds"] * 1.02) for point in curve(other)]
        pairs = [(valid, perplexity_at(curve(best), seconds)) for valid, seconds in at]
        known = [(theirs, ours) for theirs, ours in pairs if ours is not None]
        below = sum(ours < theirs for theirs, ours in known)
        rows.append(row([other.title, f"{below} of {len(known)}"]))
    return [
        "## Target: below the others at every second of training",
        "",
        f"Points of the other curves at which {best.title} is below.",
        "",
        *table(["head", "points"], rows),
    ]


def pictures(contenders: Sequence[Contender], records: Records) -> dict[str, bytes]:
    """The picture by name of its file; none before a run has finished."""
    found = _finished(contenders, records)
    if not found:
        return {}
    figure = new_figure(10, 4)
    axes = figure.subplots(1, 2, sharey=True)
    for number, result in enumerate(found):
        run, style = result.runs[0], line_style(number)
        minutes = [point["seconds"] / 60 for point in curve(result)]
        values = [point["valid"] for point in curve(result)]
        axes[0].plot(minutes, values, label=result.title, **style)
        if run["bytes"] is not None:
            axes[1].plot(run["bytes"] / 2**20, values[-1], "o", color=style["color"])
    axes[0].set(yscale="log", xlabel="CPU minutes of training, one core")
    axes[0].set_ylabel("validation perplexity (log scale)")
    axes[1].set(xscale="log", xlabel="memory of the head in training, MiB")
    for panel in axes:
        panel.grid(alpha=0.3, which="both")
    axes[0].legend(frameon=False, fontsize="small")
    return {PICTURE: rendered(figure)}
