"""Clipping of gradients that are distributed over several ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree.distributed.sharded_trees import ShardedTreeEnsemble
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
    :func:`shard_trees` was applied.

    The norm is that of the gradients on all ranks, and all ranks scale by the same factor. All
    ranks must call it.

    Args:
        module: module whose gradients are clipped.
        max_norm: largest norm.
        norm_type: p of the p-norm, or ``inf``.
        error_if_nonfinite: whether to raise for a norm that is not finite, before scaling.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        RuntimeError: if the norm is not finite and ``error_if_nonfinite`` is set.

    Example:
        >>> import torch, hstree
        >>> head = hstree.Softmax(2, 3, bias=False, reduction="sum")
        >>> hidden = torch.tensor([[30.0, 40.0]])
        >>> _ = torch.nn.init.zeros_(head.weight)
        >>> head(hidden, torch.tensor([0])).loss.backward()
        >>> hstree.distributed.clip_grad_norm_(head, 1.0)
        tensor(40.8248)
        >>> round(float(head.weight.grad.norm()), 4)
        1.0
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
    """Parameters grouped by the mesh over which FSDP shards them and the mesh over which the trees
    are distributed."""
    of_trees = {
        id(parameter): head.mesh
        for head in module.modules()
        if isinstance(head, ShardedTreeEnsemble)
        for parameter in head.stacked_parameters().values()
    }
    parts: dict[Place, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        place = getattr(parameter, "device_mesh", None), of_trees.get(id(parameter))
        parts.setdefault(place, []).append(parameter)
    return list(parts.items())


def _whole(norm: Tensor, norm_type: float, trees: DeviceMesh | None) -> Tensor:
    """The norm over all ranks, from the norm of DTensors or of different trees on each rank."""
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if trees is not None and math.isinf(norm_type):
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=trees.get_group())
    elif trees is not None:
        power = norm**norm_type
        dist.all_reduce(power, group=trees.get_group())
        norm = power ** (1 / norm_type)
    return norm
