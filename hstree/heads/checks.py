"""Checks of the options of heads."""

from __future__ import annotations

import torch
from torch import Tensor


def check_order(order: Tensor | None, n_classes: int) -> Tensor:
    """An order of the classes, int64 [V], by default 0, 1, 2, ...; raises ValueError for what is no
    permutation."""
    if order is None:
        return torch.arange(n_classes)
    right = order.shape == (n_classes,) and order.dtype == torch.int64
    if not right or not torch.equal(order.sort().values, torch.arange(n_classes)):
        raise ValueError(
            f"order: expected a permutation of 0..{n_classes - 1}, int64 [{n_classes}]"
        )
    return order
