"""Which kernels an op runs."""

import torch
from torch import Tensor


def of_cuda(tensor: Tensor) -> bool:
    """Whether they are those for CUDA, which keep other tensors for the backward pass."""
    return tensor.device.type == "cuda"


def cpu_capability() -> str:
    """The instruction set of the CPU kernels: portable, dotprod, avx2 or avx512."""
    return str(torch.ops.hstree.cpu_capability())
