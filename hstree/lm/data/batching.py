"""Token streams as batches for truncated backpropagation through time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IGNORE = -100


class Streams:
    """A text of n tokens, split into B parallel streams.

    Stream b reads ``tokens[b L : (b + 1) L]`` and predicts ``tokens[b L + 1 : (b + 1) L + 1]``,
    with ``L = ceil((n - 1) / B)``. Every token except the first is a target exactly once. Positions
    beyond the end of the text hold token 0 and target ``ignore_index``. Only the tokens of the
    requested window are read, so the text may be a memory map of any size.

    Args:
        tokens: class ids [n] of any integer type; not copied.
        batch_size: number of streams, B, at most n - 1.
        ignore_index: target of the positions beyond the end.

    Raises:
        ValueError: ``tokens`` are not integers in one dimension, ``batch_size`` < 1, or too few
            tokens for it.
    """

    def __init__(
        self, tokens: npt.ArrayLike, batch_size: int, *, ignore_index: int = IGNORE
    ) -> None:
        array: npt.NDArray[Any] = np.asarray(tokens)
        if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(
                f"tokens: expected integers in one dimension, got {array.dtype} "
                f"of shape {array.shape}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        n_targets = len(array) - 1
        if n_targets < batch_size:
            raise ValueError(
                f"batch_size: expected at least {batch_size + 1} tokens for a batch size of "
                f"{batch_size}, got {len(array)}"
            )
        self.batch_size = batch_size
        self.ignore_index = ignore_index
        self._length = length = -(-n_targets // batch_size)
        full = n_targets // length  # streams without a gap
        self._tokens = array[: full * length].reshape(full, length)
        self._target = array[1 : full * length + 1].reshape(full, length)
        self._rest = array[full * length :]  # of the stream that may end early

    def __len__(self) -> int:
        """Number of time steps, L."""
        return self._length

    def window(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the ``t = min(length, L - start)`` time steps from ``start`` on:
        int64 [t, B], on the CPU.

        Raises:
            ValueError: ``start`` is outside [0, L) or ``length`` < 1.
        """
        if not 0 <= start < self._length:
            raise ValueError(f"start: expected 0 to {self._length - 1}, got {start}")
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        stop = min(start + length, self._length)
        shape = (stop - start, self.batch_size)
        full = len(self._tokens)
        tokens, target = np.empty(shape, np.int64), np.empty(shape, np.int64)
        tokens[:, :full] = self._tokens[:, start:stop].T
        target[:, :full] = self._target[:, start:stop].T
        if full < self.batch_size:
            tokens[:, full:] = 0
            target[:, full:] = self.ignore_index
            rest = self._rest[start : stop + 1]
            if len(rest) > 1:
                tokens[: len(rest) - 1, full] = rest[:-1]
                target[: len(rest) - 1, full] = rest[1:]
        return torch.from_numpy(tokens), torch.from_numpy(target)

    def windows(self, length: int, stop: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive windows of ``length`` time steps, of the first ``stop`` or all; the last may
        be shorter. Raises ValueError if ``length`` < 1."""
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        end = self._length if stop is None else min(stop, self._length)
        return (self.window(start, min(length, end - start)) for start in range(0, end, length))
