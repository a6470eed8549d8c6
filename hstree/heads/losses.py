"""Class weights, chunks of rows, and what becomes of the log-probabilities of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hstree._numerics import is_transformed
from hstree.heads.tables import check_entries
from hstree.ops import default_chunk_rows
from hstree.ops.target_log_softmax import log_softmax


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
    right = weight.isfinite() & (weight >= 0)
    check_entries("class_weight", weight, right, "a finite number of at least 0")
    return weight


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


def mask_candidates(log_prob: Tensor, candidates: Tensor, n_classes: int) -> Tensor:
    """The log-probabilities with 0 for candidates -1 and NaN for V."""
    log_prob = log_prob.masked_fill(candidates == -1, 0.0)
    return log_prob.masked_fill(candidates == n_classes, torch.nan)


def tempered(log_prob: Tensor, temperature: float) -> Tensor:
    """Logarithms [..., V] of p^(1 / temperature), normalized. Unless the temperature is 1,
    ``log_prob`` may be any scores whose softmax is p."""
    if temperature == 1.0:
        return log_prob
    # The rounding error of a large term that all classes share would grow with the quotient.
    most = log_prob.amax(-1, keepdim=True)
    return log_softmax((log_prob - most) / temperature)
