"""Targets as the operators take them."""

from __future__ import annotations

import torch
from torch import Tensor

from hstree._transforms import is_transformed


def mark_targets(target: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    """Targets int64 with -1 in place of ``ignore_index``. Every other value is then a class in [0,
    V), or V, which no class has, in place of what is none: the operators make its row NaN.

    Raises:
        ValueError: on the CPU, for a target that is neither in [0, V) nor ``ignore_index``. On a
            GPU, where looking would cost a synchronisation, under torch.compile and under
            torch.func it becomes V.

    Example:
        >>> mark_targets(torch.tensor([3, -100, 0]), n_classes=5, ignore_index=-100)
        tensor([ 3, -1,  0])
    """
    ignored = target == ignore_index
    if target.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        bad = (target < 0) | (target >= n_classes)
        return target.masked_fill(bad, n_classes).masked_fill(ignored, -1)
    if target.numel():
        lowest, highest = target.masked_fill(ignored, 0).aminmax()
        if lowest < 0 or highest >= n_classes:
            bad = ((target < 0) | (target >= n_classes)) & ~ignored
            raise ValueError(
                f"target: expected values in [0, {n_classes}) or ignore_index {ignore_index}, "
                f"got {int(target[bad][0])}"
            )
    return target.masked_fill(ignored, -1)
