"""Checks of arguments and inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_count(name: str, value: Any) -> int:
    """The value as an int, if it is a whole number of at least 1; else raises ValueError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name}: expected a whole number of at least 1, got {value!r}")
    return int(value)


def has_batch(input: Tensor, channels: int, dimensions: int) -> bool:
    """Whether the input is [N, channels, ...] with so many lengths, or [channels, ...]; raises
    ValueError if it is neither."""
    batched = input.dim() == dimensions + 2
    if (batched or input.dim() == dimensions + 1) and input.shape[-dimensions - 1] == channels:
        return batched
    shape = ", ".join([str(channels), *"DHW"[3 - dimensions :]])
    raise ValueError(f"input: expected shape [N, {shape}] or [{shape}], got {tuple(input.shape)}")
