"""Dtypes of results."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, scores and log-probabilities: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def at_least_float32(tensor: Tensor) -> Tensor:
    """The tensor in float32, or unchanged if it is float64 or float32."""
    return tensor.to(sum_dtype(tensor.dtype))


def dtype_name(dtype: torch.dtype) -> str:
    """The name without the module: ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def input_dtype(linear: nn.Linear) -> torch.dtype:
    """The dtype that a linear layer computes in: that of its weight, or float32 if
    ``torch.ao.quantization.quantize_dynamic`` has replaced it, whose weight is a method."""
    return getattr(linear.weight, "dtype", torch.float32)
