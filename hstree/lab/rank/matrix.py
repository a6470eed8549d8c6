"""The log-probabilities of a language model over a text, as a matrix read in blocks of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.lm.models import LanguageModel, read_stream

DTYPES = (torch.float32, torch.float64)
_WINDOW_BYTES = 1 << 25  # of log-probabilities that a model computes at once
_WINDOW = 128  # largest number of contexts of these


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix that may be larger than memory.

    Attributes:
        shape: rows and columns.
        dtype: dtype of the matrix, float32 or float64.
        device: device of its blocks.
        blocks: function of a number of rows. Every call returns a new iterator over the blocks, in
            order from the first row, of at most that many rows.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    blocks: Callable[[int], Iterator[Tensor]]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {self.dtype}")

    @property
    def window_bytes(self) -> int:
        """Approximate memory for computing a block, without the block itself."""
        return 8 * max(_WINDOW_BYTES, self.shape[1] * self.dtype.itemsize)


def model_log_prob(
    model: LanguageModel,
    tokens: npt.NDArray[Any],
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> BlockMatrix:
    """The matrix log P(class | context) over a text that is read as one stream: row i has the
    log-probabilities (in nats) of all V classes after the first i + 1 tokens, starting from a zero
    state.

    Args:
        model: language model, used in evaluation mode. For float64, a copy of it computes in
            float64: with results rounded to float32, the rounding errors would give the matrix full
            rank.
        tokens: class ids, [n], of any integer type; may be a memory map.
        rows: number of contexts, from the first one on; None: all.
        dtype: dtype of the matrix, float32 or float64.

    Raises:
        ValueError: there are no tokens, ``rows`` is below 1 or above their number, or the dtype is
            another one.
    """
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            "tokens: expected at least one integer in one dimension, got "
            f"{tokens.dtype} of shape {tokens.shape}"
        )
    used = _first_rows(rows, len(tokens), "tokens")
    n_classes = model.head.n_classes
    weight = model.backbone.embedding.weight

    @torch.no_grad()
    def blocks(size: int) -> Iterator[Tensor]:
        reader = model if weight.dtype == dtype else copy.deepcopy(model).to(dtype)
        length = min(size, max(1, min(_WINDOW, _WINDOW_BYTES // (n_classes * dtype.itemsize))))
        windows = read_stream(reader, tokens[:used], length=length)
        parts = (reader.head.log_prob(hidden).to(dtype) for hidden in windows)
        while block := list(islice(parts, size // length)):
            yield torch.cat(block)

    return BlockMatrix((used, n_classes), dtype, weight.device, blocks)


def stored_matrix(
    values: npt.NDArray[Any] | Tensor,
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> BlockMatrix:
    """An existing matrix, in memory or as a memory map. It may have any real numbers: whether the
    exponentials of a row sum to 1 is not checked.

    Args:
        values: the matrix, [N, V], floating point.
        rows: number of rows, from the first one on; None: all.
        dtype, device: dtype (float32 or float64) and device of its blocks.

    Raises:
        ValueError: values are not floating point in two dimensions, or empty; ``rows`` is below 1
            or above their number; or the dtype is another one.
    """
    floating = (
        values.is_floating_point()
        if isinstance(values, Tensor)
        else np.issubdtype(values.dtype, np.floating)
    )
    if values.ndim != 2 or not floating or 0 in values.shape:
        raise ValueError(
            "values: expected floating-point numbers in two dimensions [N, V], got "
            f"{values.dtype} of shape {tuple(values.shape)}"
        )
    used = _first_rows(rows, values.shape[0], "rows in the matrix")
    place = torch.device(device)
    kind = np.float32 if dtype == torch.float32 else np.float64

    def blocks(size: int) -> Iterator[Tensor]:
        for start in range(0, used, size):
            part = values[start : min(start + size, used)]
            block = part if isinstance(part, Tensor) else torch.from_numpy(np.array(part, kind))
            yield block.to(place, dtype)

    return BlockMatrix((used, values.shape[1]), dtype, place, blocks)


def _first_rows(rows: int | None, available: int, what: str) -> int:
    if rows is not None and not 1 <= rows <= available:
        raise ValueError(f"rows: expected 1 to {available:,} (the {what}), got {rows:,}")
    return available if rows is None else rows
