"""The rows of a batch sorted by leaf: ``torch.ops.hstree.leaf_order``."""

from __future__ import annotations

import torch
from torch import Tensor


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


torch.library.register_fake("hstree::leaf_order", _fake)
