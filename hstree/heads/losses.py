"""Class weights, and sums over all classes in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hstree._transforms import is_transformed
from hstree.ops import default_chunk_rows


def check_class_weight(class_weight: Any, n_classes: int) -> Tensor | None:
    """Class weights as a floating-point tensor [V], or None for None.

    Raises:
        ValueError: unless they are V finite numbers of at least 0.
    """
    if class_weight is None:
        return None
    try:
        weight = torch.as_tensor(class_weight, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"class_weight: expected {n_classes} numbers, got {error}") from error
    if weight.shape != (n_classes,) or weight.is_complex() or weight.dtype == torch.bool:
        raise ValueError(
            f"class_weight: expected {n_classes} numbers, one per class, got "
            f"shape {tuple(weight.shape)} and dtype {weight.dtype}"
        )
    if not weight.is_floating_point() or weight.dtype == torch.float64:
        weight = weight.to(torch.get_default_dtype())
    if not bool((weight.isfinite() & (weight >= 0)).all()):
        at = int((~(weight.isfinite() & (weight >= 0))).nonzero()[0])
        raise ValueError(
            f"class_weight[{at}]: expected a finite number of at least 0, got {weight[at].item()}"
        )
    return weight


def mean_of(total: Tensor, weight: Tensor) -> Tensor:
    """total / weight, []; NaN for a weight of 0, as in torch, but with a gradient of 0."""
    nothing = weight == 0
    return (total / weight.masked_fill(nothing, 1.0)).masked_fill(nothing, torch.nan)


def in_row_chunks(function: Callable[..., Tensor], columns: int, *tensors: Tensor) -> Tensor:
    """``function(*tensors)`` [N] of tensors [N, ...], in chunks of rows with ``columns`` numbers in
    each row. The backward pass computes each chunk again. Not chunked under torch.func, which has
    no checkpoints, and in an exported program."""
    if is_transformed() or torch.compiler.is_exporting():
        return function(*tensors)
    chunks = split_rows(columns, *tensors)
    return torch.cat([checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks])


def split_rows(columns: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Chunks of the rows of tensors [N, ...], for ``columns`` numbers in each row. One chunk in an
    exported program, which must take any number of rows."""
    if torch.compiler.is_exporting():
        return [tensors]
    size = default_chunk_rows(tensors[0], columns)
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
