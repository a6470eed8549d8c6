"""The rows of a batch sorted by leaf: ``torch.ops.hstree.leaf_order``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._autograd import fold, no_second_derivative, one_by_one, register_autograd, unfold


def leaf_order(target: Tensor, leaf_position: Tensor) -> Tensor:
    """Sort the rows of a batch by the leaf of their target, in each of T trees.

    The rows below any node of a tree are then contiguous. :func:`hstree.ops.path_log_prob` and
    :func:`hstree.ops.wide_log_prob` with the same trees and targets can share the result. Not
    differentiable. Deterministic.

    Equivalent to, for tree t, with every target in [0, V)::

        order[t] = leaf_position[t, target].argsort(stable=True)

    Args:
        target: classes, [N] int64; rows with a negative target come last.
        leaf_position: rank of each class's leaf from the left, [T, V] int32, at least 0.

    Returns:
        The rows of the batch in order, [T, N] int64.

    Raises:
        RuntimeError: for a wrong shape, dtype or device and, on the CPU, a target out of range. On
            CUDA rows with a target out of range come last.

    Example:
        >>> import torch
        >>> from hstree.ops import leaf_order
        >>> leaf_order(torch.tensor([2, 0, -1, 1]), torch.tensor([[1, 2, 0]], dtype=torch.int32))
        tensor([[0, 1, 3, 2]])
    """
    order: Tensor = torch.ops.hstree.leaf_order(target, leaf_position)
    return order


def _fake(target: Tensor, leaf_position: Tensor) -> Tensor:
    return target.new_empty((leaf_position.shape[0], target.shape[0]))


def _vmap(info: Any, in_dims: Any, target: Tensor, leaf_position: Tensor) -> tuple[Tensor, int]:
    op = torch.ops.hstree.leaf_order
    if in_dims[1] is not None:
        return one_by_one(op)(info, in_dims, target, leaf_position)
    (rows,) = fold((target,), in_dims[:1], (0,), info.batch_size)
    return split_order(op(rows, leaf_position), info.batch_size), 1


def split_order(order: Tensor, size: int) -> Tensor:
    """The order [T, size, N] of the rows of each element of a batch, from that of all rows."""
    rows = order.shape[1] // size
    by_element = (order // rows).argsort(dim=1, stable=True)
    return unfold(order.gather(1, by_element) % rows, 1, size)


torch.library.register_fake("hstree::leaf_order", _fake)
register_autograd("leaf_order", no_second_derivative("leaf_order"), vmap=_vmap)
