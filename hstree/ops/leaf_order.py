"""The rows of a batch in the order of their leaves: ``torch.ops.hstree.leaf_order``."""

from __future__ import annotations

import torch
from torch import Tensor


def leaf_order(target: Tensor, leaf_position: Tensor) -> Tensor:
    """Sorts the rows of a batch by the leaf of their target, in each of T trees.

    Rows below any node of a tree are then neighbours. :func:`hstree.ops.path_log_prob` and
    :func:`hstree.ops.wide_log_prob` on the same trees and targets can share the result.

    Equivalent to, for tree t, with every target in [0, V)::

        order[t] = leaf_position[t, target].argsort(stable=True)

    Args:
        target: [N] int64 classes; rows with a negative one come last.
        leaf_position: [T, V] int32, rank of each class's leaf from the left, at least 0.

    Returns:
        order [T, N] int64, rows of the batch. Not differentiable; deterministic.

    Raises:
        RuntimeError: for a shape, dtype, device or, on the CPU, a target that does not fit, naming
            the argument. On CUDA rows with a target out of range come last.

    Example:
        >>> leaf_order(torch.tensor([2, 0, -1, 1]), torch.tensor([[1, 2, 0]], dtype=torch.int32))
        tensor([[0, 1, 3, 2]])
    """
    order: Tensor = torch.ops.hstree.leaf_order(target, leaf_position)
    return order


def _fake(target: Tensor, leaf_position: Tensor) -> Tensor:
    return target.new_empty((leaf_position.shape[0], target.shape[0]))


torch.library.register_fake("hstree::leaf_order", _fake)
