"""The page and the pictures of benchmarks.trees_study, from its records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import step_times
from benchmarks.planned import Contender, Records, Result, results, sweep_table
from hstree.lab.report import Report, made_on, row_table
from hstree.lm.report import Column, Table, decimals, legend, line_style, new_figure, table

TIMED = (
    "softmax",
    "adaptive",
    "sampled-in-batch-512-decay-0.1",
    "leaves-4x256",
    "leaves-4x256-decay-0.1",
    "forest-sampled-decay-0.1",
)
"""Contenders of the curves over time, the softmax first."""
VALID_TARGETS = ((107.9, 2.3e6), (105.0, 3.0e6))
"""Validation perplexity, at most, with at most this many parameters of the head."""

INTRODUCTION = """\
One LSTM layer, five epochs, one protocol for every head; **not converged**. The learning rate of
the head (of the whole model for tied heads) was chosen for each head by the validation perplexity
of the first seed; further seeds follow with the chosen one. Other shapes of trees take over the
rate of four trees with C = 256. ± is the standard deviation over seeds. *Rows scored* are the
vectors that a training step multiplies with a context, mean over the training text. *Head step* is
a forward and backward pass of the untrained head alone over 700 contexts, as a share of that of
`F.linear` + `F.cross_entropy` in the same process. With all classes in the last tenth of the steps,
both are those of the others.
"""
NOTHING = "No run has finished yet."

Family = Callable[[Contender], bool]
FAMILIES: dict[str, Family] = {
    "softmax": lambda c: c.settings["head"] == "softmax",
    "adaptive softmax": lambda c: c.settings["head"] == "adaptive",
    "sampled softmax": lambda c: c.settings["head"] == "sampled",
    "mixture of softmaxes": lambda c: c.settings["head"] == "mos",
    "forest of softmaxes": lambda c: c.settings["head"] == "forest",
    "trees, vectors of their own": lambda c: _trees(c) and not _shared(c),
    "trees, shared leaves": lambda c: _shared(c),
}
MARKERS = "sDvXp^o"


def _trees(contender: Contender) -> bool:
    return contender.settings["head"] == "trees"


def _shared(contender: Contender) -> bool:
    return "node_vectors=leaves" in contender.settings.get("head_option", ())


def is_full(contender: Contender) -> bool:
    """Whether its runs have the epochs of the page's first table."""
    return "epochs" not in contender.final


def _tied(contender: Contender) -> bool:
    return bool(contender.settings.get("tied"))


def report(contenders: Sequence[Contender], records: Records) -> Report:
    """The page, its tables and pictures."""
    found = results(contenders, records)
    if not found:
        return Report("Trees beside softmaxes on Penn Treebank", [], [NOTHING])
    full = [result for result in found if is_full(result.contender)]
    shapes = [result for result in found if not is_full(result.contender)]
    drawn = [result for result in full if result.mean("valid") is not None]
    times = step_times.load(records.path)
    tables = [_results(full, {} if times is None else times["heads"])]
    pictures = {"": _cost_picture(drawn)} if drawn else {}
    notes = ["the same for all heads: " + ", ".join(_common(contenders))]
    if times is not None:
        timed = [(r, share) for r in drawn if (share := times["shares"].get(r.contender.name))]
        title = "CPU time of a training step of the whole model over that with a softmax"
        columns: list[Column] = [
            ("head", lambda pair: pair[0].title),
            ("step / softmax", lambda pair: pair[1], "{:.2f}".format),
        ]
        tables.append(table(title, timed, columns))
        notes.append(
            "steps were timed in turns in one process and those of heads alone one after another, "
            f"medians; {made_on([times])}"
        )
        pictures["time"] = _time_picture(timed)
    tables += [*_shapes(shapes), _targets(full), *_bands(drawn), sweep_table(contenders, records)]
    return Report(
        "Trees beside softmaxes on Penn Treebank",
        tables,
        notes,
        pictures=pictures,
        introduction=INTRODUCTION,
        appendix="Records of all runs: [trees-study.json](trees-study.json).",
        made=made_on(records.all()),
    )


def _common(contenders: Sequence[Contender]) -> Iterator[str]:
    """The settings that all contenders share."""
    for name, value in contenders[0].settings.items():
        if all(contender.settings.get(name) == value for contender in contenders):
            yield f"{name.replace('_', ' ')} {value}"


def _results(found: Sequence[Result], shares: Mapping[str, float]) -> Table:
    """With the head steps of some contenders by name."""

    def rates(result: Result) -> str:
        swept = result.contender.sweeps or {"head_learning_rate_factor": ()}
        return ", ".join(f"{result.settings[name]:g}" for name in swept)

    columns: list[Column] = [
        ("head", lambda r: r.title),
        ("factor or rate", rates, str),
        ("valid", lambda r: r.spread("valid"), str),
        ("test", lambda r: r.spread("test"), str),
        ("seeds", lambda r: len(r.runs), str),
        ("parameters", lambda r: r.mean("head_parameters"), _millions),
        ("rows scored", lambda r: r.mean("rows"), lambda n: "" if n is None else f"{n:,.0f}"),
        ("head step", lambda r: shares.get(r.contender.name), decimals(2)),
    ]
    return table("Results", found, columns)


def _millions(value: float | None) -> str:
    return "" if value is None else f"{value / 1e6:.2f} M"


def _shapes(found: Sequence[Result]) -> Iterator[Table]:
    """Tables of the numbers of trees and the widths of the root."""
    for tied in (False, True):
        own = [result for result in found if _tied(result.contender) == tied]
        by_shape = {(r.settings["n_trees"], r.settings["root"]): r.spread("valid") for r in own}
        trees, roots = (sorted({shape[axis] for shape in by_shape}) for axis in (0, 1))
        columns: list[Column] = [("trees, tied" if tied else "trees", str)]
        columns += [(f"C = {root:,}", _of_shape(by_shape, root), str) for root in roots]
        if own:
            yield table(
                f"Validation perplexity of {'tied ' * tied}trees with shared leaves after "
                f"{own[0].settings['epochs']} epochs, a schedule of their own, one seed",
                trees,
                columns,
            )


def _of_shape(by_shape: Mapping[tuple[int, int], str], root: int) -> Callable[[int], str]:
    return lambda n_trees: by_shape.get((n_trees, root), "")


def _targets(found: Sequence[Result]) -> Table:
    trees = [r for r in found if _shared(r.contender) and r.mean("valid") is not None]
    untied = [r for r in trees if not _tied(r.contender)]
    targets = [
        (
            f"valid at most {limit:g} with at most {most / 1e6:g} M parameters",
            [r for r in untied if (r.mean("head_parameters") or 0) <= most],
            limit,
        )
        for limit, most in VALID_TARGETS
    ]
    for result in found:
        limit = result.mean("valid")
        if result.contender.name == "softmax-tied" and limit is not None:
            what = f"tied: valid at most that of the tied softmax, {limit:.1f}"
            targets.append((what, [r for r in trees if _tied(r.contender)], limit))
    rows = []
    for what, fitting, limit in targets:
        best = min(fitting, key=lambda r: r.mean("valid") or 0.0, default=None)
        if best is None:
            rows.append((what, "not run yet", "", ""))
        else:
            met = "yes" if (best.mean("valid") or 0.0) <= limit else "no"
            rows.append((what, best.title, best.spread("valid"), met))
    header = ("target", "best trees", "valid", "met")
    return row_table("Targets", header, rows, None, None, str)


def _bands(found: Sequence[Result]) -> Iterator[Table]:
    """The loss by word frequency."""
    shown = [r for r in found if r.contender.group < 2]
    if not shown:
        return
    first = shown[0].runs[0]["bands"]
    total = sum(band["tokens"] for band in first)
    columns: list[Column] = [("head", lambda r: r.title)]
    above = None
    for place, band in enumerate(first):
        name = f"{band['from']:,} and more" if above is None else f"{band['from']:,} to {above:,}"
        columns.append((
            f"{name} ({band['tokens'] / total:.0%})",
            lambda r, place=place: fmean(run["bands"][place]["loss"] for run in r.runs),
            "{:.3f}".format,
        ))  # fmt: skip
        above = band["from"] - 1
    yield table(
        "Nats per token of the validation text, by the number of times that the word occurs in "
        "the training text (share of the tokens)",
        shown,
        columns,
    )


def _time_picture(timed: Iterable[tuple[Result, float]]) -> Any:
    """Validation perplexity against time."""
    figure = new_figure(7.5, 4.2)
    axes = figure.subplots()
    for result, share in timed:
        perplexities = result.runs[0]["epochs"]
        spent = [share * (n + 1) for n in range(len(perplexities))]
        style = line_style(TIMED.index(result.contender.name))
        axes.plot(spent, perplexities, marker="o", label=result.title, **style)
    axes.set(yscale="log", xlim=(0, None), xlabel="training time, in epochs of the softmax")
    axes.set_ylabel("validation perplexity (log scale)")
    axes.yaxis.set_major_locator(FixedLocator([100, 110, 120, 130, 140, 150, 160, 180, 200]))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    legend(figure, loc="lower center", ncols=2)
    return figure


def _cost_picture(found: Sequence[Result]) -> Any:
    """Validation perplexity against rows scored and parameters."""
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
    return figure
