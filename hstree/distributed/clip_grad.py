"""Clipping of gradients whose parts lie on several ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree.distributed.trees import ShardedTreeEnsemble
from hstree.optim.clip_grad import scale_gradients, total_norm

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """:func:`hstree.optim.clip_grad_norm_` for a module to which :func:`fully_shard` or
    :func:`shard_trees` was applied: the norm counts the gradients on all ranks, and all ranks scale
    alike. All of them must call it.

    Args:
        module: its parameters count.
        max_norm: largest norm.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: raise for a norm that is not finite, before anything is scaled.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> model(hidden, target).loss.backward()
        >>> hstree.distributed.clip_grad_norm_(model, 1.0)
        >>> optimizer.step()
    """
    parts = _parts(module)
    norms = [_whole(total_norm(own, norm_type), norm_type, trees) for (_, trees), own in parts]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"error_if_nonfinite: expected gradients of a finite norm, got {total.item()}"
        )
    for _, own in parts:
        scale_gradients(own, max_norm, total)
    return total


Place: TypeAlias = tuple["DeviceMesh | None", "DeviceMesh | None"]


def _parts(module: nn.Module) -> list[tuple[Place, list[nn.Parameter]]]:
    """Parameters by the mesh over which FSDP shards them and the one whose ranks have other
    trees."""
    of_trees = {
        id(parameter): head.mesh
        for head in module.modules()
        if isinstance(head, ShardedTreeEnsemble)
        for _, parameter in head.stacked_parameters()
    }
    parts: dict[Place, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        place = getattr(parameter, "device_mesh", None), of_trees.get(id(parameter))
        parts.setdefault(place, []).append(parameter)
    return list(parts.items())


def _whole(norm: Tensor, norm_type: float, trees: DeviceMesh | None) -> Tensor:
    """The norm over all ranks: of DTensors, and of what differs over a mesh."""
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if trees is not None and math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=trees.get_group())
    elif trees is not None:
        power = norm**norm_type
        dist.all_reduce(power, group=trees.get_group())
        norm = power ** (1 / norm_type)
    return norm
