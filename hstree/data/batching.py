"""Token streams as batches for truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100


def batchify(
    tokens: npt.NDArray[np.integer[Any]], batch_size: int, *, ignore_index: int = IGNORE
) -> tuple[Tensor, Tensor]:
    """Cut a stream of n tokens into ``batch_size`` streams that run side by side.

    Stream b reads ``tokens[b L : (b + 1) L]`` and predicts ``tokens[b L + 1 : (b + 1) L + 1]``,
    with ``L = ceil((n - 1) / batch_size)``. So every token but the first is a target exactly once;
    places beyond the end of the text hold input 0 and target ``ignore_index``.

    Args:
        tokens: class ids [n].
        batch_size: B, at most n - 1.
        ignore_index: target of the places beyond the end.

    Returns:
        inputs, targets: int64 [L, B].

    Raises:
        ValueError: ``batch_size`` < 1, or too few tokens for it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
    n_targets = len(tokens) - 1
    if n_targets < batch_size:
        raise ValueError(
            f"batch_size: {len(tokens)} tokens are too few for a batch of {batch_size} streams; "
            f"at least {batch_size + 1} are needed"
        )
    length = -(-n_targets // batch_size)
    stream = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    inputs = torch.zeros(batch_size * length, dtype=torch.int64)
    targets = torch.full((batch_size * length,), ignore_index, dtype=torch.int64)
    inputs[:n_targets] = stream[:-1]
    targets[:n_targets] = stream[1:]
    return inputs.view(batch_size, length).t().contiguous(), targets.view(
        batch_size, length
    ).t().contiguous()


def windows(inputs: Tensor, targets: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Consecutive windows of ``length`` time steps (the last may be shorter) of what
    :func:`batchify` made."""
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    for start in range(0, len(inputs), length):
        yield inputs[start : start + length], targets[start : start + length]
