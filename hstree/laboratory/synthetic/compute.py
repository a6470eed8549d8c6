"""The synthetic bottleneck experiment: what an output layer of D features can express, no network.

N contexts, each with a vector of its own that is free to move, and M outcomes, whose parameters all
contexts share, fit targets P*(. | c_j) drawn from a Dirichlet distribution. Nothing is left unseen:
what a head does not fit, it cannot express, or Adam did not find. Ganea et al., Breaking the
Softmax Bottleneck via Learnable Monotonic Pointwise Non-linearities, 2019.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from .heads import DEFAULT_HEADS, HeadChoice, choose_head

FITTED = 1e-4
"""Nats of Kullback-Leibler divergence below which a fit ends: nothing is left to gain."""


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
        ValueError: a size below 1 (2 for outcomes), an empty list, something twice in a list, an
            alpha or learning rate that is not positive, or options that a head does not take.
    """

    contexts: int = 200
    outcomes: int = 100
    dimensions: tuple[int, ...] = (2, 4, 8, 16, 32)
    alphas: tuple[float, ...] = (0.01, 0.1)
    heads: tuple[HeadChoice, ...] = field(
        default_factory=lambda: tuple(map(choose_head, DEFAULT_HEADS))
    )
    steps: int = 400
    learning_rates: tuple[float, ...] = (0.05, 0.2, 0.8)
    seeds: int = 2

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
        """How many fits :func:`synthetic_bottleneck` makes."""
        cells = len(self.alphas) * len(self.dimensions) * len(self.heads)
        return cells * (len(self.learning_rates) + self.seeds - 1)


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
        cells: one for each alpha, head and dimension.
    """

    setting: SyntheticSetting
    fits: tuple[SyntheticFit, ...]
    search: tuple[SyntheticFit, ...]
    baselines: tuple[SyntheticBaseline, ...]
    cells: tuple[SyntheticCell, ...]


# Targets and measures


def dirichlet_targets(
    contexts: int, outcomes: int, alpha: float, seed: int
) -> npt.NDArray[np.float64]:
    """P* [N, M], rows from the symmetric Dirichlet distribution of concentration alpha."""
    return np.random.default_rng(seed).dirichlet(np.full(outcomes, alpha), contexts)


def entropy(targets: Tensor) -> Tensor:
    """-sum_y P*(y) log P*(y) [N] in nats: targets [N, M]."""
    entropies: Tensor = torch.special.entr(targets).sum(-1)
    return entropies


def cross_entropy(targets: Tensor, log_prob: Tensor) -> Tensor:
    """-sum_y P*(y) log P(y) [N] in nats: targets and log P [N, M]; 0 log 0 = 0."""
    return -torch.where(targets > 0, targets * log_prob, 0.0).sum(-1)


def mode_matching(targets: Tensor, log_prob: Tensor) -> float:
    """Percentage of rows whose greatest entries are in the same place: [N, M] both."""
    same = targets.argmax(-1) == log_prob.argmax(-1)
    return 100 * float(same.double().mean())


def constant_prediction(targets: Tensor) -> tuple[float, float]:
    """Mean KL(P* || mean of P*) in nats, and the percentage of modes that this mean has: targets
    [N, M], or those of several seeds with a mean each [S, N, M]."""
    mean = targets.mean(-2, keepdim=True).expand_as(targets)
    excess = cross_entropy(targets, mean.log()) - entropy(targets)
    return float(excess.mean()), mode_matching(targets, mean)


# Fitting


def fit_head(
    choice: HeadChoice,
    targets: npt.NDArray[np.float64],
    dimension: int,
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
    head = choice.build(dimension, targets, seed).to(device)
    context = nn.Parameter(torch.randn(len(targets), dimension).to(device))
    groups: list[dict[str, Any]] = [{"params": [context], "lr": learning_rate}]
    groups += head.parameter_groups(learning_rate, weight_decay=0.0)
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
    fit_cell = partial(_fit_cell, setting, device)
    tasks = list(itertools.product(setting.alphas, setting.heads, setting.dimensions))
    processes = min(processes, len(tasks))
    fits, search, cells = [], [], []
    with ExitStack() as stack:
        done: Iterable[tuple[list[SyntheticFit], list[SyntheticFit]]] = map(fit_cell, tasks)
        if processes > 1:
            with ExitStack() as quiet:  # workers inherit that Ctrl-C is ignored; this one ends them
                if threading.current_thread() is threading.main_thread():  # which alone receives it
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


def _targets(setting: SyntheticSetting, alpha: float, seed: int) -> npt.NDArray[np.float64]:
    return dirichlet_targets(setting.contexts, setting.outcomes, alpha, seed)


def _fit_cell(
    setting: SyntheticSetting, device: torch.device | None, cell: tuple[float, HeadChoice, int]
) -> tuple[list[SyntheticFit], list[SyntheticFit]]:
    """The fits of the first seed by learning rate, and the fit of each seed with the best of
    them."""
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
