"""Checks of inputs."""

from __future__ import annotations

from torch import Tensor


def has_batch(input: Tensor, channels: int, dimensions: int) -> bool:
    """Whether the input is [N, channels, ...] with so many lengths, or [channels, ...]; raises
    ValueError if it is neither."""
    batched = input.dim() == dimensions + 2
    if (batched or input.dim() == dimensions + 1) and input.shape[-dimensions - 1] == channels:
        return batched
    shape = ", ".join([str(channels), *"DHW"[3 - dimensions :]])
    raise ValueError(f"input: expected shape [N, {shape}] or [{shape}], got {tuple(input.shape)}")
