"""Optimisers for dense and row-sparse parameters, averaging, the lengths of windows, gradient
clipping and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hstree._dtypes import sum_dtype
from hstree.models import LanguageModel
from hstree.optim import SparseAdam
from hstree.runs import ConfigError, TrainConfig
from hstree.runs.config import SHORTEST_WINDOW


def build_optimizers(
    model: LanguageModel, config: TrainConfig, *, averaged: bool = False
) -> list[Optimizer]:
    """Optimisers of the backbone's and the head's parameter groups.

    ``adamw``: AdamW for the dense groups, SparseAdam for the row-sparse ones; ``sgd``: SGD for
    both. Every parameter group holds ``factor``, by which :func:`set_learning_rate` multiplies the
    backbone's learning rate. For a group with a learning rate of its own the factor is that rate
    over ``config.learning_rate``: the top of the schedule gives the rate itself, and warm-up and
    decay scale it as they scale the backbone's. A parameter that head and backbone share counts as
    the backbone's. Row-sparse groups have no weight decay.

    Args:
        model: the language model.
        config: optimizer, learning rate, weight decay.
        averaged: averaged SGD instead (:class:`torch.optim.ASGD` with t0 = 0 and lambd = 0), which
            holds the mean of the weights after each of its steps but the first; see
            :func:`averaged_weights`. Its learning rate is that of the step before, from the second
            step on.

    Raises:
        ConfigError: averaged SGD for a head with row-sparse groups, whose averages change in every
            row.
        ValueError: the head's groups leave out a parameter.
    """
    backbone = list(model.backbone.parameters())
    taken = {id(parameter) for parameter in backbone}
    dense: list[dict[str, Any]] = [{"params": backbone, "factor": 1.0}]
    sparse: list[dict[str, Any]] = []
    for group in model.head.parameter_groups():
        parameters = [p for p in group.params if p.requires_grad and id(p) not in taken]
        taken |= {id(parameter) for parameter in parameters}
        factor = group.learning_rate_factor
        if group.learning_rate is not None:
            factor = group.learning_rate / config.learning_rate
        if parameters:
            target = sparse if group.sparse else dense
            settings: dict[str, Any] = {"params": parameters, "factor": factor}
            if group.weight_decay is not None and not group.sparse:
                settings["weight_decay"] = group.weight_decay
            target.append(settings)
    forgotten = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in taken
    ]
    if forgotten:
        raise ValueError(
            f"head {model.head.name}: parameter_groups() leaves out {', '.join(forgotten)}"
        )
    if averaged and sparse:
        raise ConfigError(
            f"--averaging, --finetune: averaged SGD cannot take the row-sparse gradients of the "
            f"head {model.head.name!r}; train it without --sparse from the start"
        )
    rate, decay = config.learning_rate, config.weight_decay
    optimizers: list[Optimizer]
    if averaged:
        optimizers = [torch.optim.ASGD(dense, lr=rate, lambd=0.0, t0=0.0, weight_decay=decay)]
    elif config.optimizer == "sgd":
        optimizers = [torch.optim.SGD(dense, lr=rate, weight_decay=decay, fused=True)]
        if sparse:
            optimizers.append(torch.optim.SGD(sparse, lr=rate))
    else:
        optimizers = [torch.optim.AdamW(dense, lr=rate, weight_decay=decay, fused=True)]
        if sparse:
            optimizers.append(SparseAdam(sparse, lr=rate))
    set_learning_rate(optimizers, rate)
    return optimizers


@contextmanager
@torch.no_grad()
def averaged_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """A context in which the parameters hold the averages of averaged SGD, and the averages the
    parameters; of other optimisers nothing changes."""

    def exchange() -> None:
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                if "ax" in state:
                    current = parameter.clone()
                    parameter.copy_(state["ax"])
                    state["ax"].copy_(current)

    optimizers = list(optimizers)
    exchange()
    try:
        yield
    finally:
        exchange()


def non_monotone(losses: Sequence[float], nonmono: int) -> bool:
    """Whether the last of the validation losses is worse than the best of all before it but the
    last ``nonmono`` of those.

    The rule by which NT-ASGD begins to average (Merity et al., Regularizing and Optimizing LSTM
    Language Models, 2018, algorithm 1) and by which fine-tuning ends.
    """
    reference = losses[: max(len(losses) - 1 - nonmono, 0)]
    return len(reference) > 0 and losses[-1] > min(reference)


def window_lengths(total: int, bptt: int, generator: np.random.Generator | None) -> Iterator[int]:
    """Lengths of consecutive windows over ``total`` time steps; the last goes beyond them if they
    do not add up.

    Args:
        total: time steps.
        bptt: length of every window without a generator.
        generator: draws every length: ``bptt``, or half of it with probability 0.05, plus a normal
            deviate of standard deviation 5, rounded towards zero, at least 5.
    """
    begin = 0
    while begin < total:
        length = bptt
        if generator is not None:
            mean = bptt if generator.random() < 0.95 else bptt / 2
            length = max(SHORTEST_WINDOW, int(generator.normal(mean, 5)))
        yield length
        begin += length


def set_learning_rate(optimizers: Iterable[Optimizer], learning_rate: float) -> None:
    """Give every parameter group ``learning_rate`` times its ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]


def scheduled_learning_rate(config: TrainConfig, step: float, total: int) -> float:
    """Learning rate of a step (counted from 0; windows of drawn lengths are fractions of it) of
    ``total``: a linear rise over ``config.warmup`` steps, then the schedule.

    ``cosine`` falls to 0 as (1 + cos(pi x)) / 2 and ``linear`` as 1 - x, where x runs from 0 at the
    end of the warm-up to 1 at the last step; ``constant`` stays.
    """
    warmup = min(config.warmup, total // 2)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most ``max_norm``; row-sparse gradients
    are summed by row first.

    Returns:
        The norm before scaling, a scalar tensor.
    """
    values: list[Tensor] = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                gradient = parameter.grad = gradient.coalesce()
            gradient = gradient.values()
        values.append(gradient)
    if not values:
        return torch.zeros(())
    norms = [torch.linalg.vector_norm(value, dtype=sum_dtype(value.dtype)) for value in values]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device, value.dtype))
    return total
