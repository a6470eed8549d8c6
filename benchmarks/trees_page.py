"""The page and the picture of benchmarks.trees_study, from its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.plot import perplexity_over_time
from benchmarks.studies import times as times_of
from benchmarks.studies.page import Result, results, row, sweep_rows, table
from benchmarks.studies.plan import Contender
from benchmarks.studies.records import Records, made_on
from hstree.lm._pictures import line_style, new_figure
from hstree.lm._pictures import picture as rendered

PICTURE, TIME_PICTURE = "trees-study.png", "trees-study-time.png"
TIMED = (
    "softmax",
    "adaptive",
    "sampled",
    "leaves-1x256",
    "leaves-4x256",
    "leaves-4x1024-relearn-2",
)
"""Contenders of the curves over time, the softmax first."""
VALID_TARGETS = ((107.9, 2.3e6), (105.0, 3.0e6))
"""Validation perplexity, at most, with at most this many parameters of the head."""

INTRODUCTION = """\
# Trees beside softmaxes on Penn Treebank

One LSTM layer, five epochs, one protocol for every head; **not converged**. The learning rate of
the head (of the whole model for tied heads) was chosen for each head by the validation perplexity
of the first seed; further seeds follow with the chosen one. Re-learned trees and other shapes take
over the rate of four trees with C = 256. ± is the standard deviation over seeds. *Rows scored* are
the vectors that a training step multiplies with a context, mean over the training text. *Head step*
is a forward and backward pass of the head alone over 700 contexts, as a share of that of `F.linear`
+ `F.cross_entropy` in the same process.
"""
NOTHING = "No run has finished yet.\n"

Family = Callable[[Contender], bool]
FAMILIES: dict[str, Family] = {
    "softmax": lambda c: c.settings["head"] == "softmax",
    "adaptive softmax": lambda c: c.settings["head"] == "adaptive",
    "sampled softmax": lambda c: c.settings["head"] == "sampled",
    "trees, vectors of their own": lambda c: _trees(c) and not _shared(c),
    "trees, shared leaves": lambda c: _shared(c) and not _relearned(c),
    "trees, shared leaves, re-learned": lambda c: _shared(c) and _relearned(c),
}
MARKERS = "sDv^oP"


def _trees(contender: Contender) -> bool:
    return contender.settings["head"] == "trees"


def _shared(contender: Contender) -> bool:
    return "node_vectors=leaves" in contender.settings.get("head_option", ())


def _relearned(contender: Contender) -> bool:
    return bool(contender.final.get("relearn_trees"))


def _tied(contender: Contender) -> bool:
    return bool(contender.settings.get("tied"))


def page(contenders: Sequence[Contender], records: Records) -> str:
    """The page in Markdown."""
    found = results(contenders, records)
    lines = [INTRODUCTION]
    if not found:
        return "\n".join([*lines, NOTHING])
    lines += _settings(contenders)
    long = [result for result in found if "epochs" not in result.contender.final]
    shapes = [result for result in found if "epochs" in result.contender.final]
    lines += ["## Results", "", *_result_table(long)]
    lines += [f"![Validation perplexity against rows scored and parameters]({PICTURE})", ""]
    times = times_of.load(records.path)
    if times is not None:
        lines += ["## Time", "", *_time_table(long, times)]
        lines += [f"![Validation perplexity against time of training]({TIME_PICTURE})", ""]
    if shapes:
        lines += ["## Numbers of trees and widths of the root", "", *_shape_tables(shapes)]
    lines += ["## Targets", "", *_targets(long)]
    lines += ["## Loss by word frequency", "", *_bands(long)]
    sweeps = sweep_rows(contenders, records)
    lines += [
        "## Learning rates tried",
        "",
        "Validation perplexity of the first seed by the value of the setting.",
        "",
        *table(["head", "setting", "value: perplexity"], sweeps, left=3),
        "## Made by",
        "",
        "    python -m benchmarks.trees_study --data ptb/ --runs runs/trees-study",
        "",
        made_on(records.all()),
        "",
        "Records of all runs: [trees-study.json](trees-study.json).",
    ]
    return "\n".join(lines) + "\n"


def _settings(contenders: Sequence[Contender]) -> list[str]:
    common = dict(contenders[0].settings)
    for contender in contenders:
        common = {k: v for k, v in common.items() if contender.settings.get(k) == v}
    text = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in common.items() if k != "seed")
    return [f"The same for all heads: {text}.", ""]


def _result_table(found: Sequence[Result]) -> list[str]:
    rows = []
    for result in found:
        rows_scored, flat = result.mean("rows"), result.mean("flat_step")
        head, parameters = result.mean("head_step"), result.mean("head_parameters")
        swept = result.contender.sweeps or {"head_learning_rate_factor": ()}
        rows.append(
            row([
                result.title,
                ", ".join(f"{result.settings[name]:g}" for name in swept),
                result.spread("valid"),
                result.spread("test"),
                str(len(result.runs)),
                "" if parameters is None else f"{parameters / 1e6:.2f} M",
                "" if rows_scored is None else f"{rows_scored:,.0f}",
                "" if head is None or flat is None else f"{head / flat:.2f}",
            ])
        )  # fmt: skip
    columns = ["head", "factor or rate", "valid", "test", "seeds", "parameters", "rows scored"]
    return table([*columns, "head step"], rows)


def _timed(found: Sequence[Result], times: Mapping[str, Any]) -> list[tuple[Result, float]]:
    """The finished contenders of the curves over time, with the shares of their steps."""
    shares = times["shares"]
    return [(r, shares[r.contender.name]) for r in found if r.contender.name in shares]


def _time_table(found: Sequence[Result], times: Mapping[str, Any]) -> list[str]:
    rows = [row([result.title, f"{share:.2f}"]) for result, share in _timed(found, times)]
    return [
        "CPU time of a training step of the whole model as a share of that with a softmax, "
        "measured in turns in one process, median. Re-learning the trees is not part of a step.",
        "",
        *table(["head", "step / softmax"], rows),
        made_on([times]),
        "",
    ]


def _shape_tables(found: Sequence[Result]) -> list[str]:
    epochs = found[0].settings["epochs"]
    lines = [
        f"Validation perplexity of trees with shared leaves after {epochs} epochs, a schedule of "
        "their own, one seed.",
        "",
    ]
    for tied, title in ((False, "trees"), (True, "trees, tied")):
        shapes = [result for result in found if _tied(result.contender) == tied]
        if shapes:
            lines += _shape_table(title, shapes)
    return lines


def _shape_table(title: str, found: Sequence[Result]) -> list[str]:
    by_shape = {(r.settings["n_trees"], r.settings["root"]): r for r in found}
    trees, roots = (sorted({shape[axis] for shape in by_shape}) for axis in (0, 1))
    rows = []
    for n_trees in trees:
        cells = [str(n_trees)]
        for root in roots:
            result = by_shape.get((n_trees, root))
            cells.append("" if result is None else result.spread("valid"))
        rows.append(row(cells))
    return table([title, *(f"C = {root:,}" for root in roots)], rows)


def _targets(found: Sequence[Result]) -> list[str]:
    rows = []
    trees = [r for r in found if _shared(r.contender) and r.mean("valid") is not None]
    untied = [r for r in trees if not _tied(r.contender)]
    for limit, most in VALID_TARGETS:
        fitting = [r for r in untied if (r.mean("head_parameters") or 0) <= most]
        what = f"valid at most {limit:g} with at most {most / 1e6:g} M parameters"
        rows.append(_target(what, fitting, limit))
    softmax = [r for r in found if r.contender.name == "softmax-tied"]
    limit = softmax[0].mean("valid") if softmax else None
    if limit is not None:
        what = f"tied: valid at most that of the tied softmax, {limit:.1f}"
        rows.append(_target(what, [r for r in trees if _tied(r.contender)], limit))
    return table(["target", "best trees", "valid", "met"], rows, left=2)


def _target(what: str, fitting: Sequence[Result], limit: float) -> str:
    if not fitting:
        return row([what, "not run yet", "", ""])
    best = min(fitting, key=lambda r: r.mean("valid") or 0.0)
    mean = best.mean("valid")
    assert mean is not None
    met = "yes" if mean <= limit else "no"
    return row([what, best.title, best.spread("valid"), met])


def _bands(found: Sequence[Result]) -> list[str]:
    shown = [r for r in found if r.contender.group < 2 and r.mean("valid") is not None]
    if not shown:
        return []
    first = shown[0].runs[0]["bands"]
    total = sum(band["tokens"] for band in first)
    titles, above = [], None
    for band in first:
        name = f"{band['from']:,} and more" if above is None else f"{band['from']:,} to {above:,}"
        titles.append(f"{name} ({band['tokens'] / total:.0%})")
        above = band["from"] - 1
    rows = [row([r.title, *_band_means(r.runs)]) for r in shown]
    return [
        "Nats per token of the validation text, by the number of times that the word occurs in the "
        "training text (share of the tokens).",
        "",
        *table(["head", *titles], rows),
    ]


def _band_means(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    by_band = zip(*([band["loss"] for band in run["bands"]] for run in runs), strict=True)
    return [f"{fmean(losses):.3f}" for losses in by_band]


def pictures(contenders: Sequence[Contender], records: Records) -> dict[str, bytes]:
    """The picture by name of its file; none before a run has finished."""
    found = [r for r in results(contenders, records) if r.mean("valid") is not None]
    found = [result for result in found if "epochs" not in result.contender.final]
    if not found:
        return {}
    drawn = {PICTURE: _cost_picture(found)}
    times = times_of.load(records.path)
    return drawn if times is None else drawn | {TIME_PICTURE: _time_picture(_timed(found, times))}


def _time_picture(timed: Sequence[tuple[Result, float]]) -> bytes:
    curves = []
    for result, share in timed:
        perplexities = result.runs[0]["epochs"]
        spent = [share * (n + 1) for n in range(len(perplexities))]
        curves.append((TIMED.index(result.contender.name), result.title, spent, perplexities))
    return perplexity_over_time(curves, "training time, in epochs of the softmax")


def _cost_picture(found: Sequence[Result]) -> bytes:
    figure = new_figure(10, 4.6)
    axes = figure.subplots(1, 2, sharey=True)
    panels = ((axes[0], "rows", 1.0), (axes[1], "head_parameters", 1e6))
    for number, (family, belongs) in enumerate(FAMILIES.items()):
        for tied in (False, True):
            own = [r for r in found if belongs(r.contender) and _tied(r.contender) == tied]
            if not own:
                continue
            color = line_style(number)["color"]
            for panel, figure_name, unit in panels:
                panel.plot(
                    [(r.mean(figure_name) or 0.0) / unit for r in own],
                    [r.mean("valid") for r in own],
                    MARKERS[number],
                    color=color,
                    fillstyle="none" if tied else "full",
                    label=f"{family}, tied" if tied else family,
                )
    axes[0].set(xscale="log", xlabel="rows scored for each word", ylabel="validation perplexity")
    axes[1].set(xlabel="parameters of the head, millions")
    for panel in axes:
        panel.grid(alpha=0.3)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return rendered(figure)
