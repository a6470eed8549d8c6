"""Parameter groups of a head for the optimizers of torch."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist
from torch import Tensor, is_grad_enabled, nn

from hstree._checks import check_hidden, check_nonnegative, check_number

LARGEST_FACTOR, FACTOR_TIMES_NORM = 8.0, 90.0
"""Of the learning rate; benchmarks/results/learning_rates.md."""


def groups_of_head(
    head: Any, lr: float, weight_decay: float, factor: float | None, hidden: Tensor | None
) -> list[dict[str, Any]]:
    """See :meth:`hstree.heads.Head.parameter_groups`. A submodule with ``parameter_groups(lr)``
    gives the groups of its own parameters."""
    lr = check_number("lr", lr, positive=True)
    if factor is None:
        lr *= min(LARGEST_FACTOR, FACTOR_TIMES_NORM / _mean_norm(head, hidden))
    else:
        lr *= check_number("factor", factor, positive=True)
    weight_decay = check_nonnegative("weight_decay", weight_decay)
    apart = {id(parameter) for parameter in head.tied_parameters()}
    groups_apart: list[dict[str, Any]] = []
    for child in head.children():
        if hasattr(child, "parameter_groups"):
            apart |= {id(parameter) for parameter in child.parameters()}
            groups_apart += child.parameter_groups(lr)
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in head.named_parameters():
        if parameter.requires_grad and id(parameter) not in apart:
            is_weight = parameter.dim() > 1 and not name.endswith("bias")
            groups.setdefault(weight_decay if is_weight else 0.0, []).append(parameter)
    own = [{"params": p, "lr": lr, "weight_decay": decay} for decay, p in groups.items()]
    return own + groups_apart


def _mean_norm(head: Any, hidden: Tensor | None) -> float:
    if hidden is None:
        return math.sqrt(head.in_features)
    check_hidden(hidden, head.in_features)
    norm = hidden.detach().float().norm(dim=-1).mean().item()
    return check_number("hidden: mean norm", norm, positive=True)


def check_one_process() -> None:
    """Raises ValueError for row-sparse gradients of several processes, which neither DDP nor FSDP
    averages."""
    if is_grad_enabled() and dist.is_available() and dist.is_initialized():
        processes = dist.get_world_size()
        if processes > 1:
            raise ValueError(
                f"sparse: expected False in training with {processes} processes, since "
                "row-sparse gradients are not averaged over them, got True"
            )
