"""Whether a transform of torch.func, or forward mode, is active."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Whether a transform of torch.func or forward mode is active. Values must then not be read,
    and derivatives may be needed where ``requires_grad`` is False."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Whether it is a tensor of :func:`torch.func.vmap` or of batched gradients."""
    return is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)
