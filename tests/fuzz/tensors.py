"""Tensors of every dtype and memory layout, and how close they must be to the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LAYOUTS = ("contiguous", "transposed", "offset", "stepped")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "offset":
        larger = tensor.new_zeros(tensor.numel() + 3)
        larger[3:] = tensor.flatten()
        return larger[3:].view(tensor.shape)
    if layout == "stepped":
        larger = tensor.new_zeros((*tensor.shape, 2))
        larger[..., 1] = tensor
        return larger[..., 1]
    return tensor.contiguous()


def tensor(values: Any, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    return laid_out(torch.as_tensor(np.asarray(values)).to(dtype), layout)


def truth(tensor: Tensor) -> Any:
    """The values in float64 numpy."""
    return tensor.detach().double().numpy()


def sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_close(
    name: str, got: Tensor, true: Any, *, scale: float = 1.0, roundings: float = 64.0
) -> None:
    """Each value is as far from the truth as some roundings of the sums allow, and one of its own
    dtype. scale: the largest magnitude that enters a sum."""
    assert tuple(got.shape) == np.shape(true), name
    if not got.numel():
        return
    values = truth(got)
    same = np.isnan(values) == np.isnan(true)
    assert same.all(), f"{name}: NaN at {np.argwhere(~same)[:3].tolist()}"
    largest = float(np.abs(np.where(np.isfinite(true), true, 0.0)).max())
    margin = roundings * torch.finfo(sums(got.dtype)).eps * max(scale, largest)
    margin += torch.finfo(got.dtype).tiny
    own = torch.finfo(got.dtype).eps * np.abs(true)
    with np.errstate(invalid="ignore"):
        error = np.where(values == true, 0.0, np.abs(values - true))
        too_large = np.abs(true) + margin + own >= torch.finfo(got.dtype).max
        error = np.where(too_large & np.isinf(values) & (values * true > 0), 0.0, error)
        wrong = ~(error <= margin + own) & ~np.isnan(true)
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise AssertionError(
            f"{name}{list(at)}: expected {np.asarray(true)[at]!r}, got {values[at]!r}, "
            f"margin {margin + np.asarray(own)[at]:.3g}"
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals NaN."""
    if one.is_sparse:
        one, other = one.to_dense(), other.to_dense()
    if one.dtype != other.dtype:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)
    )


def exact_leaves(*tensors: Tensor | None) -> list[Any]:
    """Copies in float64 that require gradients."""
    return [None if x is None else x.detach().double().clone().requires_grad_() for x in tensors]
