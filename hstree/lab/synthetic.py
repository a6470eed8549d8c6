"""The synthetic bottleneck experiment: what an output layer of D features can express.

There is no network: N contexts, each with a trainable vector of D numbers, and M outcomes, whose
parameters all contexts share, are fitted by full-batch Adam to targets drawn once,

    P*(. | c_j) ~ Dirichlet(alpha),    loss = -1/N sum_j sum_y P*(y | c_j) log P(y | h_j).

All targets are training data, so a head that does not fit them cannot express them, or Adam did not
find the solution. Reports for every head, D and alpha the share of contexts whose most probable
outcome is right (mode matching), and KL(P* || P), the cross-entropy minus the entropy of the
targets (Ganea et al., Breaking the Softmax Bottleneck via Learnable Monotonic Pointwise
Non-linearities, 2019).
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._progress import track
from hstree.heads import Head, build_head, head_names
from hstree.lm.cli import Argument, positive
from hstree.lm.config import ConfigError, parse_options
from hstree.lm.report import Table, count, decimals, legend, line_style, panels, plain

from .report import Measurement, Report, row_table

Targets = npt.NDArray[np.float64]
FITTED = 1e-4  # Kullback-Leibler divergence in nats below which a fit stops early
MARKERS = "osD^vP*X"  # of the curves of a picture

# For a hundred outcomes: fast, and with far fewer parameters than probabilities to fit.
_OPTIONS: dict[str, dict[str, Any]] = {
    "plif": {"intervals": 1000},
    "plif-frozen": {"intervals": 1000},
    "monotonic": {"units": 64, "intervals": 1024},
    "mos": {"components": 4},
    "mos-plif": {"components": 4, "function_options": {"intervals": 1000}},
    "moc": {"components": 4},
    "adaptive": {"div_value": 1},
    "trees": {"n_trees": 4, "recipe": "random", "clusters": 2, "binary": True, "gate": "context"},
}
_SHAPES: dict[str, dict[str, Any]] = {
    "trees-single": {"n_trees": 1},
    "trees-wide": {"clusters": 10},
}
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
        frequencies. Parameters are drawn from torch's generator, trees from ``seed``."""
        frequencies = np.rint(1e6 * targets.sum(0)).astype(np.int64)
        try:
            sizes = dimension, targets.shape[1]
            return build_head(self.name, *sizes, frequencies=frequencies, seed=seed, **self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"heads: {self.label}, D = {dimension}: {error}") from None


def known_heads() -> list[str]:
    """The names that ``choose_head`` accepts: all heads, and several shapes of trees."""
    return sorted({*head_names(), *_SHAPES})


def choose_head(text: str) -> HeadChoice:
    """Parse a head from ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``: one of ``known_heads()``, and
    options, as JSON or plain text, beside or in place of those that it has in this experiment.

    Example:
        >>> from hstree.lab.synthetic import choose_head
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


class SyntheticResult(NamedTuple):
    setting: Mapping[str, Any]  # the arguments of :func:`synthetic_bottleneck`
    fits: list[SyntheticFit]  # for each alpha, head, dimension and seed
    baselines: list[dict[str, float]]
    """For each alpha: mean entropy of the targets, and divergence and mode matching of the best
    prediction that ignores the context, the mean of all targets; means over seeds."""

    def statistics(
        self, name: str, alpha: float, head: HeadChoice, dimension: int
    ) -> tuple[float, float]:
        """Mean and standard deviation of a quantity over the seeds; 0 with one seed or if the mean
        is infinite."""
        key = alpha, head.label, dimension
        cell = [fit for fit in self.fits if (fit.alpha, fit.head, fit.dimension) == key]
        values = [getattr(fit, name) for fit in cell]
        mean = fmean(values)
        return mean, stdev(values) if len(values) > 1 and math.isfinite(mean) else 0.0


def dirichlet_targets(contexts: int, outcomes: int, alpha: float, seed: int) -> Targets:
    """Targets P* [N, M], rows of the symmetric Dirichlet distribution of concentration alpha."""
    return np.random.default_rng(seed).dirichlet(np.full(outcomes, alpha), contexts)


def cross_entropy(targets: Tensor, log_prob: Tensor) -> Tensor:
    """Cross-entropy -sum_y P*(y) log P(y), [N], in nats, of targets and log P [N, M], where 0 log 0
    is 0; of targets and their own logarithm, the entropy."""
    return -torch.where(targets > 0, targets * log_prob, 0.0).sum(-1)


def mode_matching(targets: Tensor, log_prob: Tensor) -> float:
    """Percentage of rows of two matrices [N, M] whose largest entries have the same index."""
    same = targets.argmax(-1) == log_prob.argmax(-1)
    return 100 * float(same.double().mean())


def fit_head(
    choice: HeadChoice,
    targets: Targets,
    dimension: int,
    learning_rate: float,
    steps: int,
    seed: int,
    alpha: float = math.nan,
) -> SyntheticFit:
    """Fit a head and a trainable vector for every context to targets [N, M], drawn with ``alpha``.

    Full-batch Adam minimizes the mean cross-entropy in float32; the learning rate decays to 0 as
    (1 + cos(pi x)) / 2. Context vectors start from a standard normal distribution, the head as
    usual. Both have the same learning rate, except for parameters with their own (the slopes of a
    PLIF, 0.02). The fit stops early if the divergence is below :data:`FITTED` or nan.
    """
    truth = torch.from_numpy(targets)
    wanted = truth.float()
    uncertainty = float(cross_entropy(truth, truth.log()).mean())
    torch.manual_seed(seed)
    head = choice.build(dimension, targets, seed)
    context = nn.Parameter(torch.randn(len(targets), dimension))
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
    heads: Sequence[str] = DEFAULT_HEADS,
    *,
    contexts: int = 200,
    outcomes: int = 100,
    dimensions: Sequence[int] = (2, 4, 8, 16, 32),
    alphas: Sequence[float] = (0.01, 0.1),
    steps: int = 400,
    learning_rates: Sequence[float] = (0.05, 0.2, 0.8),
    seeds: int = 2,
) -> SyntheticResult:
    """Fit every head, see ``choose_head``, at every alpha and dimension D, with at most
    ``steps`` steps: the first seed with all learning rates of the grid, the other seeds, with other
    targets and initial values, with the one of the smallest divergence. Raises ValueError if a list
    has repetitions, or a head does not accept its options."""
    lists = {"dimensions": dimensions, "alphas": alphas, "heads": heads}
    lists |= {"learning_rates": learning_rates}
    for name, values in lists.items():
        if not values or len({*values}) < len(values):
            raise ValueError(f"{name}: expected at least one, all different, got {[*values]}")
    cells = [*itertools.product(map(choose_head, heads), dimensions)]
    for choice, dimension in cells:  # before the work
        choice.build(dimension, np.full((1, outcomes), 1 / outcomes), 0)
    fits, baselines = [], []
    for alpha in alphas:
        of_seeds = [dirichlet_targets(contexts, outcomes, alpha, seed) for seed in range(seeds)]
        for choice, dimension in track(cells, f"fitting heads, alpha = {alpha:g}", len(cells)):
            options: Any = {"steps": steps, "alpha": alpha}
            tried = [
                fit_head(choice, of_seeds[0], dimension, rate, seed=0, **options)
                for rate in learning_rates
            ]
            best = min(tried, key=lambda result: result.divergence)
            fits.append(best)
            for seed in range(1, seeds):
                targets, rate = of_seeds[seed], best.learning_rate
                fits.append(fit_head(choice, targets, dimension, rate, seed=seed, **options))
        truth = torch.from_numpy(np.stack(of_seeds))
        mean = truth.mean(-2, keepdim=True).expand_as(truth)
        uncertainty = cross_entropy(truth, truth.log())
        excess = float((cross_entropy(truth, mean.log()) - uncertainty).mean())
        baseline = {"alpha": alpha, "entropy": float(uncertainty.mean()), "divergence": excess}
        baselines.append(baseline | {"mode_matching": mode_matching(truth, mean)})
    numbers = {"contexts": contexts, "outcomes": outcomes, "steps": steps, "seeds": seeds}
    setting = {**numbers, **lists, "heads": [*map(choose_head, heads)]}
    return SyntheticResult(setting, fits, baselines)


def measure(arguments: argparse.Namespace) -> Report:
    names = ("contexts", "outcomes", "dimensions", "steps", "learning_rates", "seeds")
    options = {name: getattr(arguments, name) for name in names} | {"alphas": arguments.alpha}
    heads = known_heads() if arguments.heads == ["all"] else arguments.heads
    result = synthetic_bottleneck(heads, **options)
    pictures = {f"alpha-{alpha:g}": synthetic_picture(result, alpha) for alpha in arguments.alpha}
    notes, title = [*_notes(result)], "Synthetic bottleneck experiment"
    return Report(title, _tables(result), notes, result, pictures)


def _tables(result: SyntheticResult) -> list[Table]:
    setting = result.setting
    several: bool = setting["seeds"] > 1
    spread = ", mean and standard deviation over seeds" * several
    digits = {"mode_matching": decimals(1), "divergence": decimals(3)}

    def cell(name: str, *place: Any) -> str:
        mean, deviation = result.statistics(name, *place)
        if name == "parameters":
            return count(int(mean))
        if not math.isfinite(mean):
            return "diverged"
        return digits[name](mean) + f" ± {digits[name](deviation)}" * several

    def table(title: str, name: str, alpha: float) -> Table:
        header = ("head", *(f"D={dimension}" for dimension in setting["dimensions"]))
        rows = [
            (head.label, *(cell(name, alpha, head, d) for d in setting["dimensions"]))
            for head in setting["heads"]
        ]
        return row_table(title, header, rows, None, str)

    tables = []
    for alpha in setting["alphas"]:
        title = f"Mode matching (% of contexts), alpha = {alpha:g}{spread}"
        tables.append(table(title, "mode_matching", alpha))
        title = f"KL(P* || P), cross-entropy minus entropy (nats), alpha = {alpha:g}{spread}"
        tables.append(table(title, "divergence", alpha))
    title = "Parameters of the head, without context vectors"
    return [*tables, table(title, "parameters", setting["alphas"][0])]


def _notes(result: SyntheticResult) -> Iterator[str]:
    setting = result.setting
    for each in result.baselines:
        yield (
            f"alpha = {each['alpha']:g}: the mean entropy of the targets is {each['entropy']:.3f} "
            f"nats; their mean as the prediction for every context is {each['divergence']:.3f} "
            f"nats away and matches {each['mode_matching']:.1f} % of the modes."
        )
    grid = setting["learning_rates"]
    again = ", used for the other seeds too" if setting["seeds"] > 1 else ""
    yield (
        f"At most {setting['steps']} steps of Adam, on all contexts at once. Of the learning rates "
        f"{', '.join(f'{rate:g}' for rate in grid)}, the one with the smallest divergence on the "
        f"first seed{again}, for each head, D and alpha."
    )
    if len(grid) > 1:
        chosen = [fit.learning_rate for fit in result.fits if fit.seed == 0]
        yield (
            f"Chosen learning rates: {len(chosen)} in total, {chosen.count(min(grid))} of them "
            f"the smallest and {chosen.count(max(grid))} the largest of the grid."
        )
    options = [
        f"{choice.label} ({', '.join(f'{key}={value}' for key, value in choice.options.items())})"
        for choice in setting["heads"]
        if choice.options
    ]
    if options:
        yield f"Options of the heads: {'; '.join(options)}."


def synthetic_picture(result: SyntheticResult, alpha: float) -> Any:
    """Plot mode matching and divergence against the dimension for one alpha, with a line for each
    head and bars of one standard deviation over seeds."""
    setting, heads = result.setting, result.setting["heads"]
    dimensions, seeds = setting["dimensions"], setting["seeds"]
    baseline = next(each for each in result.baselines if each["alpha"] == alpha)
    figure, (left, right) = panels(9.6, 4.2 + 0.22 * math.ceil(len(heads) / 4), 1, 2)
    for number, head in enumerate(heads):
        style: dict[str, Any] = line_style(number) | {"marker": MARKERS[number % len(MARKERS)]}
        # The first are drawn on top.
        style |= {"ms": 4.5, "capsize": 2, "label": plain(head.label), "zorder": 3 - number / 100}
        for axes, name in ((left, "mode_matching"), (right, "divergence")):
            cells = [(d, *result.statistics(name, alpha, head, d)) for d in dimensions]
            # Bars stay above 0 on a log scale.
            points = [(d, m, min(sd, 0.9 * m)) for d, m, sd in cells if 0 <= m < math.inf]
            if points:
                axes.errorbar(*zip(*points, strict=True), **style)
    left.axhline(baseline["mode_matching"], color="0.5", ls=":")
    label = "one prediction for all contexts"
    right.axhline(baseline["divergence"], color="0.5", ls=":", label=label)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(dimensions, list(map(str, dimensions)))
        axes.set_xlabel("dimension D of a context vector (log scale)")
    left.set(ylabel="contexts whose mode is matched (%)", ylim=(0, 102))
    right.set(ylabel="KL(P* || P) (nats, log scale)", yscale="log")
    sizes = f"{setting['contexts']} contexts, {setting['outcomes']} outcomes"
    of_seeds = f"{seeds} {'seeds' if seeds > 1 else 'seed'}"
    figure.suptitle(f"{sizes}, targets ~ Dirichlet({alpha:g}), {of_seeds}", fontsize=10)
    legend(figure, *right.get_legend_handles_labels(), loc="lower center", ncols=4)
    return figure


_ALPHA = "concentrations of the Dirichlet distribution: the smaller, the more uneven the targets"
_HEADS = "names, or NAME:KEY=VALUE,KEY=VALUE with options of the head, such as mos:components=15 "
_HEADS += "or trees:n_trees=2,clusters=16; all: every head that reads one vector"
_RATES = "grid of learning rates; the best on the first seed is chosen for each head, D and alpha"
COMMAND = Measurement(
    "synthetic",
    "what each head can express with D features",
    measure,
    (
        Argument("--contexts", "N, number of contexts", 200),
        Argument("--outcomes", "M, number of outcomes", 100),
        Argument("--dimensions", "sizes D to try", [2, 4, 8, 16, 32]),
        Argument("--alpha", _ALPHA, [0.01, 0.1], type=positive),
        Argument("--heads", _HEADS, list(DEFAULT_HEADS), metavar="HEAD", nargs="+"),
        Argument("--steps", "largest number of steps of Adam in a fit", 400),
        Argument("--learning-rates", _RATES, [0.05, 0.2, 0.8], type=positive),
        Argument("--seeds", "number of repetitions, each with other targets", 2),
    ),
    output="results",
)
