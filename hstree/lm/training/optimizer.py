"""Optimizers for dense and row-sparse parameters, averaging, the lengths of windows and
learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hstree.heads import Head
from hstree.lm.models import LanguageModel
from hstree.lm.runs import ConfigError, TrainConfig
from hstree.lm.runs.config import SHORTEST_WINDOW
from hstree.optim import AdamW


def build_optimizers(
    model: LanguageModel, config: TrainConfig, *, averaged: bool = False
) -> list[Optimizer]:
    """Optimizers of the parameter groups of the backbone and the head: one for dense gradients,
    another for row-sparse ones.

    Every parameter group holds ``factor``, by which :func:`set_learning_rate` multiplies the
    backbone's learning rate. For a group with a learning rate of its own it is this rate over
    ``config.learning_rate``: the top of the schedule gives the rate itself, and warm-up and decay
    scale it as they scale the backbone's. A parameter that head and backbone share counts as the
    backbone's. Biases have the weight decay of the weights, row-sparse parameters have none.

    ``averaged``: :class:`torch.optim.ASGD` with t0 = 0 and lambd = 0, which keeps the mean of the
    weights after each of its steps except the first; from the second step on, it uses the learning
    rate of the previous step. Raises ConfigError with row-sparse gradients, since averages change
    in every row.
    """
    rate, decay = config.learning_rate, config.weight_decay
    embedding = model.backbone.embedding
    backbone = list(model.backbone.parameters())
    taken = {id(parameter) for parameter in backbone}
    row_sparse = {id(parameter) for parameter in model.head.sparse_parameters()}
    # Saved runs store the optimizer states in this order.
    dense: list[dict[str, Any]] = [{"params": backbone, "factor": 1.0}]
    sparse: list[dict[str, Any]] = []
    if embedding.sparse:
        dense[0]["params"] = [p for p in backbone if p is not embedding.weight]
        sparse.append({"params": [embedding.weight], "factor": 1.0, "weight_decay": 0.0})
    for group in _head_groups(model.head, config):
        own = [p for p in group["params"] if id(p) not in taken]
        taken |= {id(parameter) for parameter in own}
        factor = group["lr"] / rate
        for groups, parameters, its_decay in (
            (dense, [p for p in own if id(p) not in row_sparse], group["weight_decay"]),
            (sparse, [p for p in own if id(p) in row_sparse], 0.0),
        ):
            if parameters:
                groups.append({"params": parameters, "factor": factor, "weight_decay": its_decay})
    forgotten = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in taken
    ]
    if forgotten:
        raise ValueError(
            f"head {model.head.name}: parameter_groups() leaves out {', '.join(forgotten)}"
        )
    if averaged and sparse:
        raise ConfigError(
            "--averaging, --finetune: averaged SGD does not support row-sparse gradients; train "
            "without --sparse and --sparse-embedding from the start"
        )
    optimizers: list[Optimizer]
    if averaged:
        optimizers = [torch.optim.ASGD(dense, lr=rate, lambd=0.0, t0=0.0, weight_decay=decay)]
    else:
        kind = torch.optim.SGD if config.optimizer == "sgd" else AdamW
        optimizers = [kind(dense, lr=rate, weight_decay=decay, fused=True)]
        if sparse:
            optimizers.append(kind(sparse, lr=rate))
    set_learning_rate(optimizers, rate)
    return optimizers


def _head_groups(head: Head, config: TrainConfig) -> list[dict[str, Any]]:
    """The groups of the head, where biases decay as weights do, as in the training of published
    perplexities, and all are in the order of the head's parameters. The parameters of a function of
    the logits keep the weight decay of their own."""
    of_function = {id(p) for p in getattr(head, "function", nn.Module()).parameters()}
    factor = config.head_learning_rate_factor
    groups = head.parameter_groups(config.learning_rate, config.weight_decay, factor=factor)
    apart = [g for g in groups if any(id(p) in of_function for p in g["params"])]
    rates: dict[float, set[int]] = {}
    for group in groups:
        if not any(group is other for other in apart):
            rates.setdefault(group["lr"], set()).update(map(id, group["params"]))
    own = [
        {
            "params": [p for p in head.parameters() if id(p) in those],
            "lr": rate,
            "weight_decay": config.weight_decay,
        }
        for rate, those in rates.items()
    ]
    return own + apart


@contextmanager
def averaged_weights(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """A context that swaps the parameters with the averages of averaged SGD. It does nothing for
    other optimizers."""

    @torch.no_grad()
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
    """Whether the last validation loss is worse than the best of the earlier ones, the last
    ``nonmono`` of these excepted: when NT-ASGD starts to average (Merity et al., Regularizing and
    Optimizing LSTM Language Models, 2018, algorithm 1) and when fine-tuning ends."""
    reference = losses[: max(len(losses) - 1 - nonmono, 0)]
    return len(reference) > 0 and losses[-1] > min(reference)


def window_lengths(
    total: int, bptt: int, generator: np.random.Generator | None, margin: int | None = None
) -> Iterator[int]:
    """Lengths of consecutive windows that cover ``total`` time steps; the last may extend beyond
    them. Each is ``bptt``; with a generator, ``bptt`` or, with probability 0.05, half of it, plus a
    normal deviate of standard deviation 5, rounded towards zero, at least 5 and at most ``bptt +
    margin``."""
    begin = 0
    while begin < total:
        length = bptt
        if generator is not None:
            mean = bptt if generator.random() < 0.95 else bptt / 2
            length = max(SHORTEST_WINDOW, int(generator.normal(mean, 5)))
            if margin is not None:
                length = min(length, bptt + margin)
        yield length
        begin += length


def set_learning_rate(optimizers: Iterable[Optimizer], learning_rate: float) -> None:
    """Give every parameter group ``learning_rate`` times its ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]


def scheduled_learning_rate(config: TrainConfig, step: float, total: int) -> float:
    """Learning rate of a step, counted from 0, out of ``total``: a linear rise over
    ``config.warmup`` steps, then the schedule, over x from 0 at the end of the warm-up to 1 at the
    last step. Windows of random length count as fractions of a step."""
    warmup = min(config.warmup, total // 2)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(total - warmup, 1)
    if config.schedule == "cosine":
        return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if config.schedule == "linear":
        return config.learning_rate * (1.0 - progress)
    return config.learning_rate
