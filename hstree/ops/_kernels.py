"""Which kernels an op runs."""

from torch import Tensor


def of_cuda(tensor: Tensor) -> bool:
    """Whether they are those for CUDA, which keep other tensors for the backward pass."""
    return tensor.device.type == "cuda"
