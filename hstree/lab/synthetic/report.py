"""``hstree experiment synthetic``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from hstree._progress import Task
from hstree.lm._arguments import Argument, positive
from hstree.lm._pictures import legend, line_style, panels, plain
from hstree.lm.runs import choose_device
from hstree.lm.table import Table, count

from ..drawing import MARKERS
from ..report import Report, row_table
from ..runner import Measurement
from .compute import SyntheticFit, SyntheticResult, SyntheticSetting, synthetic_bottleneck
from .heads import DEFAULT_HEADS, choose_head, known_heads


def measure(arguments: argparse.Namespace) -> Report:
    names = known_heads() if arguments.heads == ["all"] else arguments.heads
    setting = SyntheticSetting(
        arguments.contexts,
        arguments.outcomes,
        tuple(arguments.dimensions),
        tuple(arguments.alpha),
        tuple(map(choose_head, names)),
        arguments.steps,
        tuple(arguments.learning_rates),
        arguments.seeds,
    )
    device = choose_device(arguments.device)
    with closing(Task("fitting heads", setting.n_fits)) as task:

        def advance(fit: SyntheticFit) -> None:
            task.note = f"{fit.head}, D = {fit.dimension}, alpha = {fit.alpha:g}"
            task.advance()

        result = synthetic_bottleneck(setting, device, advance, processes=arguments.processes)
    return synthetic_report(result)


def synthetic_report(result: SyntheticResult) -> Report:
    alphas = result.setting.alphas
    return Report(
        "Synthetic bottleneck experiment",
        _tables(result),
        list(_notes(result)),
        result,
        result.fits,
        {f"alpha-{alpha:g}": synthetic_picture(result, alpha) for alpha in alphas},
    )


def _tables(result: SyntheticResult) -> list[Table]:
    several = result.setting.seeds > 1
    spread = ", mean and standard deviation over seeds" if several else ""
    texts: dict[str, dict[tuple[str, int], str]] = {}
    for cell in result.cells:
        for name, digits, title in (
            ("mode_matching", 1, "Mode matching (% of contexts)"),
            ("divergence", 3, "KL(P* || P), cross-entropy minus entropy (nats)"),
        ):
            mean, deviation = getattr(cell, name), getattr(cell, f"{name}_deviation")
            text = f"{mean:,.{digits}f}" + (f" ± {deviation:,.{digits}f}" if several else "")
            of_table = texts.setdefault(f"{title}, alpha = {cell.alpha:g}{spread}", {})
            of_table[cell.head, cell.dimension] = text if math.isfinite(mean) else "diverged"
    texts["Parameters of the head, without context vectors"] = {
        (fit.head, fit.dimension): count(fit.parameters) for fit in result.fits
    }
    heads = [choice.label for choice in result.setting.heads]
    dimensions = result.setting.dimensions
    header = ["head", *(f"D={dimension}" for dimension in dimensions)]
    rows = {
        title: [(head, *(cells[head, d] for d in dimensions)) for head in heads]
        for title, cells in texts.items()
    }
    return [row_table(title, header, of_table, None, str) for title, of_table in rows.items()]


def _notes(result: SyntheticResult) -> Iterator[str]:
    setting = result.setting
    for each in result.baselines:
        yield (
            f"alpha = {each.alpha:g}: the mean entropy of the targets is {each.entropy:.3f} nats; "
            f"their mean as the prediction for every context is {each.divergence:.3f} nats away "
            f"and matches {each.mode_matching:.1f} % of the modes."
        )
    rates = ", ".join(f"{rate:g}" for rate in setting.learning_rates)
    again = ", used for the other seeds too" if setting.seeds > 1 else ""
    yield (
        f"At most {setting.steps} steps of Adam, on all contexts at once. Of the learning rates "
        f"{rates}, the one with the smallest divergence on the first seed{again}, for each head, D "
        "and alpha."
    )
    if len(setting.learning_rates) > 1:
        chosen = [cell.learning_rate for cell in result.cells]
        yield (
            f"Chosen learning rates: {len(chosen)} in total, "
            f"{chosen.count(min(setting.learning_rates))} of them the smallest and "
            f"{chosen.count(max(setting.learning_rates))} the largest of the grid."
        )
    options = [
        f"{choice.label} ({', '.join(f'{key}={value}' for key, value in choice.options.items())})"
        for choice in setting.heads
        if choice.options
    ]
    if options:
        yield f"Options of the heads: {'; '.join(options)}."


_STYLE: dict[str, Any] = {"ms": 4.5, "lw": 1.4, "elinewidth": 0.8, "capsize": 2}


def synthetic_picture(result: SyntheticResult, alpha: float) -> Any:
    """Plot mode matching and divergence against the dimension for one alpha, with a line for each
    head and bars of one standard deviation over seeds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    setting = result.setting
    baseline = next(each for each in result.baselines if each.alpha == alpha)
    figure, (left, right) = panels(9.6, 4.2 + 0.22 * math.ceil(len(setting.heads) / 4), 1, 2)
    for number, choice in enumerate(setting.heads):
        cells = [c for c in result.cells if (c.alpha, c.head) == (alpha, choice.label)]
        cells.sort(key=lambda cell: cell.dimension)
        finite = [cell for cell in cells if 0 < cell.divergence < math.inf]
        style = _STYLE | line_style(number) | {"marker": MARKERS[number % len(MARKERS)]}
        # the first are drawn on top
        style |= {"label": plain(choice.label), "zorder": 3 - number / 100}
        matched = [(c.dimension, c.mode_matching, c.mode_matching_deviation) for c in cells]
        left.errorbar(*zip(*matched, strict=True), **style)
        right.errorbar(
            [cell.dimension for cell in finite],
            [cell.divergence for cell in finite],
            [min(cell.divergence_deviation, 0.9 * cell.divergence) for cell in finite],
            **style,
        )
    dotted = {"color": "0.5", "linestyle": (0, (1, 2)), "lw": 1.0}
    left.axhline(baseline.mode_matching, **dotted)
    right.axhline(baseline.divergence, **dotted, label="one prediction for all contexts")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(setting.dimensions, list(map(str, setting.dimensions)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("dimension D of a context vector (log scale)")
    left.set(ylabel="contexts whose mode is matched (%)", ylim=(0, 102))
    right.set(ylabel="KL(P* || P) (nats, log scale)", yscale="log")
    low, high = right.get_ylim()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 4, 5, 6, 8)
    right.yaxis.set_major_locator(LogLocator(subs=subs))
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.yaxis.set_minor_formatter(NullFormatter())
    seeds = f"{setting.seeds} {'seeds' if setting.seeds > 1 else 'seed'}"
    sizes = f"{setting.contexts} contexts, {setting.outcomes} outcomes"
    figure.suptitle(f"{sizes}, targets ~ Dirichlet({alpha:g}), {seeds}", fontsize=10)
    legend(figure, *right.get_legend_handles_labels(), loc="lower center", ncols=4)
    return figure


_POSITIVE = {"metavar": "X", "type": positive, "nargs": "+"}
COMMAND = Measurement(
    "synthetic",
    "what each head can express with D features",
    """\
The softmax bottleneck without a network: N contexts, each with a trainable vector of D numbers, and
M outcomes, whose parameters all contexts share, are fitted by full-batch Adam to targets from a
Dirichlet distribution. For every head, D and alpha, reports the share of contexts whose most
probable outcome is right (mode matching), and the divergence KL(P* || P), which is the
cross-entropy minus the entropy of the targets. Takes three to four minutes on two cores with the
defaults. Ctrl-C stops it without writing anything.
""",
    measure,
    (
        Argument("--contexts", "N, number of contexts", 200),
        Argument("--outcomes", "M, number of outcomes", 100),
        Argument("--dimensions", "sizes D to try", [2, 4, 8, 16, 32]),
        Argument(
            "--alpha",
            "concentrations of the symmetric Dirichlet distribution; the smaller, the fewer "
            "outcomes have most of a target's mass",
            [0.01, 0.1],
            type=positive,
        ),
        Argument(
            "--heads",
            "names, or NAME:KEY=VALUE,KEY=VALUE with options of the head, such as "
            "mos:components=15 or trees:n_trees=2,root=16; all: every head that reads one vector",
            list(DEFAULT_HEADS),
            metavar="HEAD",
            nargs="+",
        ),
        Argument("--steps", "largest number of steps of Adam in a fit", 400),
        Argument(
            "--learning-rates",
            "grid of learning rates; the best on the first seed is chosen for each head, D "
            "and alpha",
            [0.05, 0.2, 0.8],
            type=positive,
        ),
        Argument("--seeds", "number of repetitions, each with other targets", 2),
        Argument("--device", "where to fit", "cpu", choices=("auto", "cpu", "cuda")),
        Argument("--processes", "to work in", 2),
    ),
    output="results",
)
