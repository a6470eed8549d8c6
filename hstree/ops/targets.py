"""Checked targets for the operators."""

from __future__ import annotations

import torch
from torch import Tensor

from hstree._checks import check_classes, check_ignore_index
from hstree._numerics import is_transformed


def mark_targets(
    target: Tensor, n_classes: int, ignore_index: int, *, name: str = "target"
) -> Tensor:
    """Replace ``ignore_index`` by -1 and bad targets by V; other targets are classes in [0, V).

    The operators ignore rows with target -1 and make rows with target V NaN.

    Args:
        target: classes, int64 or, as in torch, uint8, of any shape.
        n_classes: number of classes, V.
        ignore_index: value of the targets to ignore.
        name: name of the argument in the message of an error.

    Returns:
        The targets, int64, shape of ``target``.

    Raises:
        TypeError: if ``target`` is no tensor.
        ValueError: for another dtype, or an ``ignore_index`` that is not a whole number of 64 bits;
            on the CPU, for a
            target that is neither in [0, V) nor ``ignore_index``. Under torch.compile, under
            torch.func, and on a GPU, where reading the values would cost a synchronization, such a
            target becomes V.

    Example:
        >>> import torch
        >>> from hstree.ops import mark_targets
        >>> mark_targets(torch.tensor([3, -100, 0]), n_classes=5, ignore_index=-100)
        tensor([ 3, -1,  0])
    """
    target = check_classes(name, target)
    ignored = target == check_ignore_index(ignore_index)
    if target.device.type != "cpu" or torch.compiler.is_compiling() or is_transformed():
        bad = (target < 0) | (target >= n_classes)
        return target.masked_fill(bad, n_classes).masked_fill(ignored, -1)
    if target.numel():
        lowest, highest = target.masked_fill(ignored, 0).aminmax()
        if lowest < 0 or highest >= n_classes:
            bad = ((target < 0) | (target >= n_classes)) & ~ignored
            raise ValueError(
                f"{name}: expected values in [0, {n_classes}) or ignore_index {ignore_index}, "
                f"got {int(target[bad][0])}"
            )
    return target.masked_fill(ignored, -1)
