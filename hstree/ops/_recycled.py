"""Memory of large results that every step allocates and frees: ``torch.ops.hstree.recycled``."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def recycled(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized tensor: on the CPU in memory that each step takes over from the one before.
    Fresh pages would cost more time than writing the tensor.

    Args:
        like: a tensor of the device, and of the dtype unless ``dtype`` is given.
        *shape: shape of the tensor.
        dtype: float32, float64, bfloat16 or float16.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape, dtype=dtype)
    flat: Tensor = torch.ops.hstree.recycled(like.new_empty(0, dtype=dtype), math.prod(shape))
    return flat.view(shape)


torch.library.register_fake("hstree::recycled", lambda like, count: like.new_empty(count))
