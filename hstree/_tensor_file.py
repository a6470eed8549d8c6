"""Tensors from safetensors files, in memory of their own."""

from __future__ import annotations

import os

from safetensors import safe_open
from torch import Tensor


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, on the CPU.

    Every tensor is a copy in memory of its own, aligned as torch aligns what it allocates (64
    bytes). The tensors that safetensors returns begin at any address. With those, matrix products
    can be slower, and on some CPUs differ in the last bits from the same products before the file
    was saved.

    Raises:
        FileNotFoundError: there is no such file.
        OSError, safetensors.SafetensorError: it cannot be read, is truncated, or is no safetensors
            file.
    """
    with safe_open(path, framework="pt") as file:
        tensors: dict[str, Tensor] = {
            name: file.get_tensor(name).clone()
            for name in file.keys()  # noqa: SIM118
        }
        metadata: dict[str, str] = file.metadata() or {}
    return tensors, metadata
