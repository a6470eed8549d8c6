"""The synthetic bottleneck experiment: what an output layer of D features can express.

There is no network: N contexts, each with a trainable vector of D numbers, and M outcomes, whose
parameters all contexts share, are fitted by full-batch Adam to targets drawn once,

    P*(. | c_j) ~ Dirichlet(alpha),    loss = -1/N sum_j sum_y P*(y | c_j) log P(y | h_j).

All targets are training data, so a head that does not fit them cannot express them, or Adam did not
find the solution. Reports for every head, D and alpha the share of contexts whose most probable
outcome is right (mode matching), and KL(P* || P), the cross-entropy minus the entropy of the
targets (Ganea et al., Breaking the Softmax Bottleneck via Learnable Monotonic Pointwise
Non-linearities, 2019). Takes three to four minutes on two cores with the defaults. Ctrl-C stops it
without writing anything.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._progress import Task
from hstree.heads import Head, build_head, head_class, head_names
from hstree.lm.cli import Argument, positive
from hstree.lm.config import ConfigError, choose_device, parse_options
from hstree.lm.report import Table, count, legend, line_style, panels, plain

from .report import MARKERS, Measurement, Report, row_table

Targets = npt.NDArray[np.float64]
FITTED = 1e-4  # Kullback-Leibler divergence in nats below which a fit stops early

# For a hundred outcomes: fast, and with far fewer parameters than probabilities to fit.
_OPTIONS: dict[str, dict[str, Any]] = {
    "plif": {"intervals": 1000},
    "plif-frozen": {"intervals": 1000},
    "monotonic": {"units": 64, "intervals": 1024},
    "mos": {"components": 4},
    "mos-plif": {"components": 4, "function_options": {"intervals": 1000}},
    "moc": {"components": 4},
    "adaptive": {"div_value": 1},
    "trees": {"n_trees": 4, "recipe": "random", "root": 1, "leaf": 1, "gate": "context"},
}
_SHAPES: dict[str, dict[str, Any]] = {"trees-single": {"n_trees": 1}, "trees-wide": {"root": 10}}
DEFAULT_HEADS = (
    *("softmax", "sigsoftmax", "gss", "gss:k=0.1,c=0", "plif", "monotonic", "mos", "mixtape"),
    *("trees-single", "trees"),
)


@dataclass(frozen=True)
class HeadChoice:
    """A head in this experiment: its name in tables, its name in :mod:`hstree.heads.registry`, and
    its options for :func:`hstree.heads.build_head`."""

    label: str
    name: str
    options: Mapping[str, Any]

    def build(self, dimension: int, targets: Targets, seed: int) -> Head:
        """Build the head for targets [N, M], initialized as for a corpus with their mean as
        frequencies. Parameters are drawn from torch's generator, trees from ``seed``. Raises
        ValueError if the head does not accept these options at this size."""
        frequencies = np.rint(1e6 * targets.sum(0)).astype(np.int64)
        try:
            sizes = dimension, targets.shape[1]
            return build_head(self.name, *sizes, frequencies=frequencies, seed=seed, **self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"heads: {self.label}, D = {dimension}: {error}") from None


def known_heads() -> list[str]:
    """The names that :func:`choose_head` accepts: all heads that read one vector, and several
    shapes of trees."""
    several = {n for n in head_names() if getattr(head_class(n), "reads_layers", False)}
    return sorted({*head_names(), *_SHAPES} - several)


def choose_head(text: str) -> HeadChoice:
    """Parse a head from ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, with values as JSON or plain
    text. ``NAME`` is one of :func:`known_heads`; options are added to its options in this
    experiment, or replace them. Raises ValueError for another name or form.

    Example:
        >>> from hstree.lab import choose_head
        >>> choose_head("mos:components=15").options
        {'components': 15}
    """
    label, _, rest = text.partition(":")
    if label not in known_heads():
        raise ValueError(f"heads: expected one of {', '.join(known_heads())}, got {label!r}")
    name = "trees" if label in _SHAPES else label
    options = _OPTIONS.get(name, {}) | _SHAPES.get(label, {})
    if rest:
        try:
            options |= parse_options(re.split(r",(?=\w+=)", rest))
        except ConfigError:
            raise ValueError(f"heads: expected NAME:KEY=VALUE,KEY=VALUE, got {text!r}") from None
    return HeadChoice(text, name, options)


@dataclass(frozen=True)
class SyntheticSetting:
    """The settings of the experiment. Raises ValueError if a size is below 1 (2 for outcomes), a
    list is empty or has repetitions, an alpha or learning rate is not positive, or a head does not
    accept its options."""

    contexts: int = 200  # N
    outcomes: int = 100  # M
    dimensions: tuple[int, ...] = (2, 4, 8, 16, 32)  # sizes D of a context vector
    alphas: tuple[float, ...] = (0.01, 0.1)
    heads: tuple[HeadChoice, ...] = field(
        default_factory=lambda: tuple(map(choose_head, DEFAULT_HEADS))
    )
    steps: int = 400  # largest number of steps of Adam in a fit
    learning_rates: tuple[float, ...] = (0.05, 0.2, 0.8)  # the best is chosen for each cell
    seeds: int = 2  # repetitions, each with other targets and initial values

    def __post_init__(self) -> None:
        for name in ("dimensions", "alphas", "heads", "learning_rates"):
            values = [getattr(value, "label", value) for value in getattr(self, name)]
            if not values:
                raise ValueError(f"{name}: expected at least one, got none")
            if len(set(values)) < len(values):
                listed = ", ".join(map(str, values))
                raise ValueError(f"{name}: expected different ones, got {listed}")
        for name in ("alphas", "learning_rates"):
            for value in getattr(self, name):
                if not 0 < value < math.inf:
                    raise ValueError(f"{name}: expected positive numbers, got {value}")
        sizes = [(name, getattr(self, name)) for name in ("contexts", "outcomes", "steps", "seeds")]
        for name, value in (*sizes, ("dimensions", min(self.dimensions))):
            least = 2 if name == "outcomes" else 1
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        for choice, dimension in itertools.product(self.heads, self.dimensions):
            choice.build(dimension, np.full((1, self.outcomes), 1 / self.outcomes), 0)

    @property
    def n_fits(self) -> int:
        """The number of fits of :func:`synthetic_bottleneck`."""
        cells = len(self.alphas) * len(self.dimensions) * len(self.heads)
        return cells * (len(self.learning_rates) + self.seeds - 1)


class SyntheticFit(NamedTuple):
    """The fit of a head to the targets of one seed. Entropies are means over contexts, in nats."""

    head: str  # its label
    alpha: float
    dimension: int
    seed: int
    learning_rate: float  # of Adam at the beginning
    steps: int
    mode_matching: float  # % of contexts whose most probable outcome is that of the target
    cross_entropy: float
    entropy: float  # of the targets
    divergence: float  # KL(P* || P), the difference of the two; infinite if the fit diverged
    parameters: int  # of the head, without context vectors


class SyntheticBaseline(NamedTuple):
    """The best prediction that ignores the context: the mean of all targets. Fields as in
    :class:`SyntheticFit`, means over seeds."""

    alpha: float
    entropy: float
    divergence: float
    mode_matching: float


class SyntheticCell(NamedTuple):
    """Mean and standard deviation (0 with one seed) of a head's fits over seeds. Fields as in
    :class:`SyntheticFit`."""

    head: str
    alpha: float
    dimension: int
    learning_rate: float
    mode_matching: float
    mode_matching_deviation: float
    divergence: float
    divergence_deviation: float


@dataclass(frozen=True)
class SyntheticResult:
    """The results of :func:`synthetic_bottleneck`: a fit for each alpha, head, dimension and seed;
    in ``search`` the fits of the first seed with all learning rates; a baseline for each alpha; and
    in ``cells`` statistics for each alpha, head and dimension."""

    setting: SyntheticSetting
    fits: tuple[SyntheticFit, ...]
    search: tuple[SyntheticFit, ...]
    baselines: tuple[SyntheticBaseline, ...]
    cells: tuple[SyntheticCell, ...]


def dirichlet_targets(contexts: int, outcomes: int, alpha: float, seed: int) -> Targets:
    """Targets P* [N, M], rows of the symmetric Dirichlet distribution of concentration alpha."""
    return np.random.default_rng(seed).dirichlet(np.full(outcomes, alpha), contexts)


def entropy(targets: Tensor) -> Tensor:
    """Entropy -sum_y P*(y) log P*(y), [N], in nats, of targets [N, M]."""
    entropies: Tensor = torch.special.entr(targets).sum(-1)
    return entropies


def cross_entropy(targets: Tensor, log_prob: Tensor) -> Tensor:
    """Cross-entropy -sum_y P*(y) log P(y), [N], in nats, of targets and log P [N, M]; 0 log 0 =
    0."""
    return -torch.where(targets > 0, targets * log_prob, 0.0).sum(-1)


def mode_matching(targets: Tensor, log_prob: Tensor) -> float:
    """Percentage of rows of two matrices [N, M] whose largest entries have the same index."""
    same = targets.argmax(-1) == log_prob.argmax(-1)
    return 100 * float(same.double().mean())


def constant_prediction(targets: Tensor) -> tuple[float, float]:
    """Mean KL(P* || mean of P*) in nats, and the percentage of modes that this mean matches, of
    targets [N, M], or [S, N, M] for several seeds with separate means."""
    mean = targets.mean(-2, keepdim=True).expand_as(targets)
    excess = cross_entropy(targets, mean.log()) - entropy(targets)
    return float(excess.mean()), mode_matching(targets, mean)


def fit_head(
    choice: HeadChoice,
    targets: Targets,
    dimension: int,
    learning_rate: float,
    steps: int,
    seed: int,
    alpha: float = math.nan,
    device: torch.device | None = None,
) -> SyntheticFit:
    """Fit a head and a trainable vector for every context to targets [N, M].

    Full-batch Adam minimizes the mean cross-entropy; the learning rate decays to 0 as (1 + cos(pi
    x)) / 2. Context vectors are initialized from a standard normal distribution, the head as usual.
    Context vectors and head have the same learning rate, except for parameters with their own (the
    slopes of a PLIF, 0.02). The fit stops early if the divergence is below :data:`FITTED` or nan.
    Training is in float32; results are computed in float64. ``alpha`` is only recorded.
    """
    truth = torch.from_numpy(targets).to(device)
    wanted = truth.float()
    uncertainty = float(entropy(truth).mean())
    torch.manual_seed(seed)
    head = choice.build(dimension, targets, seed).to(device)
    context = nn.Parameter(torch.randn(len(targets), dimension).to(device))
    groups: list[dict[str, Any]] = [{"params": [context], "lr": learning_rate}]
    groups += head.parameter_groups(learning_rate, weight_decay=0.0, factor=1.0)
    optimizer = torch.optim.Adam(groups, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    step = 0
    while step < steps:
        optimizer.zero_grad()
        loss = cross_entropy(wanted, head.log_prob(context)).mean()
        if not float(loss.detach()) - uncertainty >= FITTED:
            break
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        step += 1
    with torch.no_grad():
        log_prob = head.log_prob(context).double()
    reached = float(cross_entropy(truth, log_prob).mean())
    reached = reached if math.isfinite(reached) else math.inf
    measures = (mode_matching(truth, log_prob), reached, uncertainty, reached - uncertainty)
    size = sum(p.numel() for p in head.parameters() if p.requires_grad)
    return SyntheticFit(choice.label, alpha, dimension, seed, learning_rate, step, *measures, size)


def synthetic_bottleneck(
    setting: SyntheticSetting,
    device: torch.device | None = None,
    advance: Callable[[SyntheticFit], None] = lambda fit: None,
    *,
    processes: int = 1,
) -> SyntheticResult:
    """Fit every head at every alpha and dimension: the first seed with all learning rates of the
    grid, the other seeds with the one of the smallest divergence.

    ``advance`` is called with each of the ``setting.n_fits`` fits, in the order of the settings.
    ``processes``, at least 1, are worker processes with one thread each, and the main module must
    be importable, as for ``spawn`` of :mod:`multiprocessing`; 1 is this process with its threads.
    """
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    fit_cell = partial(_fit_cell, setting, device)
    tasks = list(itertools.product(setting.alphas, setting.heads, setting.dimensions))
    processes = min(processes, len(tasks))
    fits, search, cells = [], [], []
    with ExitStack() as stack:
        done: Iterable[tuple[list[SyntheticFit], list[SyntheticFit]]] = map(fit_cell, tasks)
        if processes > 1:
            with ExitStack() as quiet:  # workers ignore Ctrl-C; this process terminates them
                if threading.current_thread() is threading.main_thread():  # only it gets the signal
                    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
                    quiet.callback(signal.signal, signal.SIGINT, before)
                spawn = multiprocessing.get_context("spawn")
                pool = spawn.Pool(processes, torch.set_num_threads, (1,))
            done = stack.enter_context(pool).imap(fit_cell, tasks)
        for tried, kept in done:
            search += tried
            fits += kept
            cells.append(_cell(kept))
            for fit in (*tried, *kept[1:]):
                advance(fit)
    baselines = []
    for alpha in setting.alphas:
        of_seeds = [_targets(setting, alpha, seed) for seed in range(setting.seeds)]
        targets = torch.from_numpy(np.stack(of_seeds))
        uncertainty = float(entropy(targets).mean())
        baselines.append(SyntheticBaseline(alpha, uncertainty, *constant_prediction(targets)))
    return SyntheticResult(setting, tuple(fits), tuple(search), tuple(baselines), tuple(cells))


def _targets(setting: SyntheticSetting, alpha: float, seed: int) -> Targets:
    return dirichlet_targets(setting.contexts, setting.outcomes, alpha, seed)


def _fit_cell(
    setting: SyntheticSetting, device: torch.device | None, cell: tuple[float, HeadChoice, int]
) -> tuple[list[SyntheticFit], list[SyntheticFit]]:
    """The fits of the first seed for all learning rates, and the fit of each seed with the best
    one."""
    alpha, choice, dimension = cell

    def fit(rate: float, seed: int) -> SyntheticFit:
        targets = _targets(setting, alpha, seed)
        return fit_head(choice, targets, dimension, rate, setting.steps, seed, alpha, device)

    tried = [fit(rate, 0) for rate in setting.learning_rates]
    best = min(tried, key=lambda result: result.divergence)
    return tried, [best, *(fit(best.learning_rate, seed) for seed in range(1, setting.seeds))]


def _cell(fits: list[SyntheticFit]) -> SyntheticCell:
    first = fits[0]
    modes = [fit.mode_matching for fit in fits]
    divergences = [fit.divergence for fit in fits]
    measures = fmean(modes), 0.0, fmean(divergences), 0.0
    if len(fits) > 1 and math.isfinite(measures[2]):
        measures = measures[0], stdev(modes), measures[2], stdev(divergences)
    return SyntheticCell(first.head, first.alpha, first.dimension, first.learning_rate, *measures)


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
        style: dict[str, Any] = (
            {"ms": 4.5, "lw": 1.4, "capsize": 2}
            | line_style(number)
            | {"marker": MARKERS[number % len(MARKERS)]}
        )
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


COMMAND = Measurement(
    "synthetic",
    "what each head can express with D features",
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
