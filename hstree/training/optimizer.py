"""Optimisers for dense and row-sparse parameters, gradient clipping and learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hstree.models import LanguageModel

from .config import TrainConfig


def build_optimizers(model: LanguageModel, config: TrainConfig) -> list[Optimizer]:
    """AdamW for the backbone and the head's dense groups, SparseAdam for its row-sparse ones.

    Every parameter group holds ``factor``, by which :func:`set_learning_rate` multiplies the
    backbone's learning rate. For a group with a learning rate of its own the factor is that rate
    over ``config.learning_rate``: the top of the schedule gives the rate itself, and warm-up and
    decay scale it as they scale the backbone's. A parameter that head and backbone share counts as
    the backbone's. SparseAdam has no weight decay.
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
    optimizers: list[Optimizer] = [
        torch.optim.AdamW(
            dense, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
    ]
    if sparse:
        optimizers.append(torch.optim.SparseAdam(sparse, lr=config.learning_rate))
    set_learning_rate(optimizers, config.learning_rate)
    return optimizers


def set_learning_rate(optimizers: Iterable[Optimizer], learning_rate: float) -> None:
    """Give every parameter group ``learning_rate`` times its ``factor``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["factor"]


def scheduled_learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Learning rate of a step (counted from 0) of ``total``: a linear rise over ``config.warmup``
    steps, then the schedule.

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
    norms: list[Tensor] = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in values]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([norm.to(norms[0].device) for norm in norms])
    )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device, value.dtype))
    return total
