"""Errors that say that memory ran out."""

from __future__ import annotations

import re

import torch


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of Python, torch, a GPU, or an operator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = r"(not enough|can't allocate|could not allocate|out of) memory|bad_alloc|size .*overflow"
    return isinstance(error, RuntimeError) and re.search(said, str(error)) is not None
