"""Reference of :mod:`hstree.ops.leaf_order`."""

import torch
from torch import Tensor


def leaf_order_reference(target: Tensor, leaf_position: Tensor) -> Tensor:
    """Order [T, N] from target [N] and leaf_position [T, V]; rows with a negative target are
    last."""
    rank = leaf_position[:, target.clamp(min=0)]
    last = torch.iinfo(rank.dtype).max
    return rank.masked_fill(target < 0, last).argsort(dim=1, stable=True)
