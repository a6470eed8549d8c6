"""The synthetic bottleneck experiment: what an output layer of D features can express.

There is no network: N contexts, each with a trainable vector, and M outcomes, whose parameters all
contexts share, fit targets P*(. | c_j) drawn from a Dirichlet distribution. All targets are
training data, so a head that does not fit them cannot express them, or Adam did not find the
solution. Ganea et al., Breaking the Softmax Bottleneck via Learnable Monotonic Pointwise
Non-linearities, 2019.
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
"""Kullback-Leibler divergence in nats below which a fit stops early."""


@dataclass(frozen=True)
class SyntheticSetting:
    """The settings of the experiment.

    Attributes:
        contexts: number of contexts, N.
        outcomes: number of outcomes, M.
        dimensions: sizes of a context vector, D.
        alphas: concentrations of the symmetric Dirichlet distribution of the targets. The smaller,
            the fewer outcomes have most of a target's mass.
        heads: heads to fit.
        steps: largest number of steps of Adam in a fit.
        learning_rates: grid from which the best is chosen for every head, D and alpha.
        seeds: number of repetitions, each with other targets and initial values.

    Raises:
        ValueError: a size is below 1 (2 for outcomes), a list is empty or has repetitions, an alpha
            or learning rate is not positive, or a head does not accept its options.
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
        """The number of fits of :func:`synthetic_bottleneck`."""
        cells = len(self.alphas) * len(self.dimensions) * len(self.heads)
        return cells * (len(self.learning_rates) + self.seeds - 1)


@dataclass(frozen=True)
class SyntheticFit:
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


@dataclass(frozen=True)
class SyntheticBaseline:
    """The best prediction that ignores the context: the mean of all targets. Fields as in
    :class:`SyntheticFit`, means over seeds."""

    alpha: float
    entropy: float
    divergence: float
    mode_matching: float


@dataclass(frozen=True)
class SyntheticCell:
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


# Targets and measures


def dirichlet_targets(
    contexts: int, outcomes: int, alpha: float, seed: int
) -> npt.NDArray[np.float64]:
    """Targets P* [N, M], with rows from the symmetric Dirichlet distribution of concentration
    alpha."""
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

    The first seed is fitted with all learning rates of the grid. The one with the smallest
    divergence is used for the other seeds.

    Args:
        setting: settings of the experiment.
        device: device of the computation.
        advance: function called with each of the ``setting.n_fits`` fits, in the order of the
            settings.
        processes: number of worker processes, each with one thread; 1 uses this process and its
            threads. With more, the main module must be importable, as for ``spawn`` of
            :mod:`multiprocessing`.

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


def _targets(setting: SyntheticSetting, alpha: float, seed: int) -> npt.NDArray[np.float64]:
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
