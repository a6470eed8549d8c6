"""The synthetic bottleneck experiment: what an output layer of D features can express, no network.

N contexts, each with a vector of its own that is free to move, and M outcomes, whose parameters all
contexts share, fit targets P*(. | c_j) drawn from a Dirichlet distribution. Nothing is left unseen:
what a head does not fit, it cannot express, or Adam did not find. Ganea et al., Breaking the
Softmax Bottleneck via Learnable Monotonic Pointwise Non-linearities, 2019.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.data import CorpusStatistics
from hstree.heads import Head, head_class, head_names

FITTED = 1e-4
"""Nats of Kullback-Leibler divergence below which a fit ends: nothing is left to gain."""

# Sizes for a hundred outcomes: parameters far fewer than the probabilities to fit, and quick.
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
_SHAPES: dict[str, dict[str, Any]] = {
    "trees-single": {"n_trees": 1},
    "trees-wide": {"root": 10},
}
DEFAULT_HEADS = (
    "softmax",
    "sigsoftmax",
    "gss",
    "gss:k=0.1,c=0",
    "plif",
    "monotonic",
    "mos",
    "mixtape",
    "trees-single",
    "trees",
)


@dataclass(frozen=True)
class HeadChoice:
    """A head and its options in this experiment.

    Attributes:
        label: what it is called in tables.
        name: in :mod:`hstree.heads.registry`.
        options: keyword arguments of its ``from_corpus``.
    """

    label: str
    name: str
    options: Mapping[str, Any]


def known_heads() -> list[str]:
    """The names that :func:`choose_head` knows: every head that reads one vector, and further
    shapes of trees."""
    return sorted(
        [name for name in head_names() if not head_class(name).reads_layers] + list(_SHAPES)
    )


def choose_head(text: str) -> HeadChoice:
    """A head from ``NAME`` or ``NAME:KEY=VALUE,KEY=VALUE``, values as JSON or plain text.

    ``NAME`` is one of :func:`known_heads`; options add to those that it has in this experiment, or
    replace them.

    Raises:
        ValueError: an unknown name, a head that reads several layers, or no KEY=VALUE.

    Example:
        >>> choose_head("mos:components=15").options
        {'components': 15}
    """
    label, _, rest = text.partition(":")
    name = "trees" if label in _SHAPES else label
    if label not in known_heads():
        if label in head_names():
            raise ValueError(
                f"heads: {label!r} reads several layers of a network; a context has one vector here"
            )
        raise ValueError(f"heads: expected one of {', '.join(known_heads())}, got {label!r}")
    options = _OPTIONS.get(name, {}) | _SHAPES.get(label, {})
    for item in re.split(r",(?=\w+=)", rest) if rest else []:
        key, equals, value = item.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"heads: expected NAME:KEY=VALUE,KEY=VALUE, got {text!r}")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return HeadChoice(text, name, options)


@dataclass(frozen=True)
class SyntheticSetting:
    """The experiment's sizes.

    Attributes:
        contexts: N.
        outcomes: M.
        dimensions: sizes D of a context vector.
        alphas: concentrations of the symmetric Dirichlet distribution of the targets. The smaller,
            the fewer outcomes share a target's mass.
        heads: what to fit.
        steps: most steps of Adam in a fit.
        learning_rates: the grid from which every head, D and alpha get their own.
        seeds: number of repetitions, each with targets and initial values of its own.

    Raises:
        ValueError: a size below 1 (2 for outcomes), an empty list, something twice in a list, or an
            alpha or learning rate that is not positive.
    """

    contexts: int = 200
    outcomes: int = 100
    dimensions: tuple[int, ...] = (2, 4, 8, 16, 32)
    alphas: tuple[float, ...] = (0.01, 0.1)
    heads: tuple[HeadChoice, ...] = field(default_factory=lambda: choose_heads(DEFAULT_HEADS))
    steps: int = 400
    learning_rates: tuple[float, ...] = (0.05, 0.2, 0.8)
    seeds: int = 2

    def __post_init__(self) -> None:
        counts = [(name, getattr(self, name), 1) for name in ("contexts", "steps", "seeds")]
        counts += [("outcomes", self.outcomes, 2)]
        counts += [("dimensions", value, 1) for value in self.dimensions]
        for name, value, least in counts:
            if value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        for name in ("alphas", "learning_rates"):
            for value in getattr(self, name):
                if not 0 < value < math.inf:
                    raise ValueError(f"{name}: expected positive numbers, got {value}")
        for name in ("dimensions", "alphas", "heads", "learning_rates"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: expected at least one, got none")
            keys = [value.label if isinstance(value, HeadChoice) else value for value in values]
            if len(set(keys)) < len(keys):
                raise ValueError(
                    f"{name}: expected different ones, got {', '.join(map(str, keys))}"
                )
        for choice in self.heads:  # all options are tried before anything is fitted
            for dimension in self.dimensions:
                build_head(choice, dimension, np.full((1, self.outcomes), 1 / self.outcomes), 0)

    @property
    def n_fits(self) -> int:
        """How many fits :func:`synthetic_bottleneck` makes."""
        cells = len(self.alphas) * len(self.dimensions) * len(self.heads)
        return cells * (len(self.learning_rates) + self.seeds - 1)


def choose_heads(texts: Sequence[str]) -> tuple[HeadChoice, ...]:
    """:func:`choose_head` of each."""
    return tuple(choose_head(text) for text in texts)


@dataclass(frozen=True)
class SyntheticFit:
    """A head fitted to the targets of one seed.

    Attributes:
        head: label.
        alpha, dimension, seed: of the targets, of the context vectors, of everything random.
        learning_rate: of Adam at the beginning.
        steps: made.
        mode_matching: percentage of contexts whose most probable outcome is that of the target.
        cross_entropy: nats, mean over contexts; never below ``entropy``.
        entropy: nats, of the targets, mean over contexts.
        divergence: the difference of the two: mean KL(P* || P), nats. Infinite where the fit
            diverged.
        parameters: of the head that were fitted, context vectors apart.
    """

    head: str
    alpha: float
    dimension: int
    seed: int
    learning_rate: float
    steps: int
    mode_matching: float
    cross_entropy: float
    entropy: float
    divergence: float
    parameters: int


@dataclass(frozen=True)
class SyntheticBaseline:
    """The best prediction that does not look at the context, the mean of all targets; fields as in
    :class:`SyntheticFit`, means over seeds."""

    alpha: float
    entropy: float
    divergence: float
    mode_matching: float


@dataclass(frozen=True)
class SyntheticCell:
    """Mean and standard deviation over seeds (0 with one seed) of a head's fits; fields as in
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
    """What :func:`synthetic_bottleneck` found.

    Attributes:
        setting: what was asked for.
        fits: one for each alpha, head, dimension and seed.
        search: the fits of the first seed with all learning rates.
        baselines: one for each alpha.
    """

    setting: SyntheticSetting
    fits: tuple[SyntheticFit, ...]
    search: tuple[SyntheticFit, ...]
    baselines: tuple[SyntheticBaseline, ...]

    def cells(self) -> list[SyntheticCell]:
        """One for each alpha, head and dimension, in the order of the setting."""
        groups: dict[tuple[float, str, int], list[SyntheticFit]] = {}
        for fit in self.fits:
            groups.setdefault((fit.alpha, fit.head, fit.dimension), []).append(fit)
        return [_cell(group) for group in groups.values()]


def _cell(fits: list[SyntheticFit]) -> SyntheticCell:
    first = fits[0]
    modes = [fit.mode_matching for fit in fits]
    divergences = [fit.divergence for fit in fits]
    several = len(fits) > 1 and all(map(math.isfinite, divergences))
    return SyntheticCell(
        first.head,
        first.alpha,
        first.dimension,
        first.learning_rate,
        fmean(modes),
        stdev(modes) if several else 0.0,
        fmean(divergences),
        stdev(divergences) if several else 0.0,
    )


# Targets and measures


def dirichlet_targets(
    contexts: int, outcomes: int, alpha: float, seed: int
) -> npt.NDArray[np.float64]:
    """P* [N, M], rows from the symmetric Dirichlet distribution of concentration alpha."""
    return np.random.default_rng(seed).dirichlet(np.full(outcomes, alpha), contexts)


def entropy(targets: Tensor) -> Tensor:
    """-sum_y P*(y) log P*(y) [N] in nats: targets [N, M]."""
    terms: Tensor = torch.special.xlogy(targets, targets)
    return -terms.sum(-1)


def cross_entropy(targets: Tensor, log_prob: Tensor) -> Tensor:
    """-sum_y P*(y) log P(y) [N] in nats: targets and log P [N, M]; 0 log 0 = 0."""
    terms: Tensor = torch.where(targets > 0, targets * log_prob, 0.0)
    return -terms.sum(-1)


def mode_matching(targets: Tensor, log_prob: Tensor) -> float:
    """Percentage of rows whose greatest entries are in the same place: [N, M] both."""
    same = targets.argmax(-1) == log_prob.argmax(-1)
    return 100 * float(same.double().mean())


def constant_prediction(targets: Tensor) -> tuple[float, float]:
    """Mean KL(P* || mean of P*) in nats, and the percentage of modes that this mean has: targets
    [N, M]."""
    mean = targets.mean(0, keepdim=True).expand_as(targets)
    excess = cross_entropy(targets, mean.log()) - entropy(targets)
    return float(excess.mean()), mode_matching(targets, mean)


# Fitting


def build_head(
    choice: HeadChoice, dimension: int, targets: npt.NDArray[np.float64], seed: int
) -> Head:
    """The head for targets [N, M].

    It begins as for a corpus in which outcomes are as frequent as in the mean of the targets.
    Parameters come from torch's generator, trees from ``seed``.

    Raises:
        ValueError: the head does not take these options at this size.
    """
    frequencies = np.rint(1e6 * targets.sum(0)).astype(np.int64)
    statistics = CorpusStatistics(frequencies, np.empty(0, np.int32))
    options = dict(choice.options) | {"learning_rate_factor": 1.0}
    try:
        return head_class(choice.name).from_corpus(
            dimension, targets.shape[1], statistics, seed=seed, **options
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"heads: {choice.label}, D = {dimension}: {error}") from None


def fit_head(
    choice: HeadChoice,
    targets: npt.NDArray[np.float64],
    dimension: int,
    *,
    learning_rate: float,
    steps: int,
    seed: int,
    alpha: float = math.nan,
    device: torch.device | None = None,
) -> SyntheticFit:
    """Fit a head and a free vector for every context to targets [N, M].

    Adam on all of the data at once, minimising the mean cross-entropy; the learning rate falls to 0
    as (1 + cos(pi x)) / 2. Context vectors begin normal with deviation 1, the head as it always
    does. Context vectors and head have the same learning rate, but for parameters with one of their
    own (the slopes of a PLIF, 0.02). The fit ends early where the divergence is below
    :data:`FITTED`, or not a number. float32; the measures are taken in float64.

    Returns:
        The same on one machine for the same arguments on the CPU. ``alpha`` is only passed on.
    """
    truth = torch.from_numpy(targets).to(device)
    wanted = truth.float()
    uncertainty = float(entropy(truth).mean())
    torch.manual_seed(seed)
    head = build_head(choice, dimension, targets, seed).to(device)
    context = nn.Parameter(torch.randn(len(targets), dimension).to(device))
    groups: list[dict[str, Any]] = [{"params": [context], "lr": learning_rate}]
    for group in head.parameter_groups():
        rate = learning_rate * group.learning_rate_factor
        rate = rate if group.learning_rate is None else group.learning_rate
        groups.append({"params": group.params, "lr": rate})
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
    return SyntheticFit(
        choice.label,
        alpha,
        dimension,
        seed,
        learning_rate,
        step,
        mode_matching(truth, log_prob),
        reached,
        uncertainty,
        reached - uncertainty,
        sum(p.numel() for p in head.parameters() if p.requires_grad),
    )


def synthetic_bottleneck(
    setting: SyntheticSetting,
    device: torch.device | None = None,
    advance: Callable[[SyntheticFit], None] = lambda fit: None,
    *,
    processes: int = 1,
) -> SyntheticResult:
    """Fit every head at every alpha and dimension.

    On the first seed with all learning rates of the grid; the one with the least divergence is that
    of the other seeds.

    Args:
        setting: sizes.
        device: where to compute.
        advance: is told of each fit, ``setting.n_fits`` in all, in the order of the setting.
        processes: how many to work in, each with one thread; with 1 it is this one, with its
            threads. More ask for a main module that may be imported again, as
            :mod:`multiprocessing` does with ``spawn``.

    Raises:
        ValueError: processes below 1.
    """
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    tasks = [
        (setting, alpha, choice, dimension, device)
        for alpha in setting.alphas
        for choice in setting.heads
        for dimension in setting.dimensions
    ]
    processes = min(processes, len(tasks))
    fits: list[SyntheticFit] = []
    search: list[SyntheticFit] = []
    with ExitStack() as stack:
        done: Iterator[tuple[list[SyntheticFit], list[SyntheticFit]]] = map(_fit_cell, tasks)
        if processes > 1:
            with _ignored_interrupts():  # the workers inherit it; this process ends them
                pool = multiprocessing.get_context("spawn").Pool(
                    processes, torch.set_num_threads, (1,)
                )
            done = stack.enter_context(pool).imap(_fit_cell, tasks)
        for tried, kept in done:
            search += tried
            fits += kept
            for fit in (*tried, *kept[1:]):
                advance(fit)
    baselines = tuple(_baseline(setting, alpha) for alpha in setting.alphas)
    return SyntheticResult(setting, tuple(fits), tuple(search), baselines)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """A context without Ctrl-C; outside the main thread, which alone receives it, nothing
    changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fit_cell(
    task: tuple[SyntheticSetting, float, HeadChoice, int, torch.device | None],
) -> tuple[list[SyntheticFit], list[SyntheticFit]]:
    """The fits of the first seed by learning rate, and the fit of each seed with the best of
    them."""
    setting, alpha, choice, dimension, device = task

    def fit(rate: float, seed: int) -> SyntheticFit:
        return fit_head(
            choice,
            dirichlet_targets(setting.contexts, setting.outcomes, alpha, seed),
            dimension,
            learning_rate=rate,
            steps=setting.steps,
            seed=seed,
            alpha=alpha,
            device=device,
        )

    tried = [fit(rate, 0) for rate in setting.learning_rates]
    best = min(tried, key=lambda result: result.divergence)
    return tried, [best, *(fit(best.learning_rate, seed) for seed in range(1, setting.seeds))]


def _baseline(setting: SyntheticSetting, alpha: float) -> SyntheticBaseline:
    targets = [
        torch.from_numpy(dirichlet_targets(setting.contexts, setting.outcomes, alpha, seed))
        for seed in range(setting.seeds)
    ]
    divergences, modes = zip(*map(constant_prediction, targets), strict=True)
    entropies = [float(entropy(each).mean()) for each in targets]
    return SyntheticBaseline(alpha, fmean(entropies), fmean(divergences), fmean(modes))
