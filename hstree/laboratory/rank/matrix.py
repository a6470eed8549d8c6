"""The matrix of log-probabilities of a language model over a text, read in blocks of rows."""

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

from hstree.models import LanguageModel, read_stream

DTYPES = (torch.float32, torch.float64)
_WINDOW_BYTES = 1 << 25  # log-probabilities that a model computes at once
_WINDOW = 128  # contexts, at most


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix that need not fit into memory.

    Attributes:
        shape: rows and columns.
        dtype: float32 or float64.
        device: where its blocks lie.
        blocks: for a number of rows, an iterator of blocks of at most that many, in order; from the
            first row on at every call.
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
        """About what the making of a block takes beside the block itself."""
        return 8 * max(_WINDOW_BYTES, self.shape[1] * self.dtype.itemsize)


def model_log_prob(
    model: LanguageModel,
    tokens: npt.NDArray[Any],
    rows: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> BlockMatrix:
    """log P(. | context) of every context of a text that is read as one stream: row i holds the
    log-probabilities (nats) of all V classes after the first i + 1 tokens, from a zero state.

    Args:
        model: read in evaluation mode. For float64 a copy of it computes in float64: rounded to
            float32 on the way, the matrix would have the full rank of its rounding errors.
        tokens: class ids [n] of any integer type; may be a memory map.
        rows: only the first contexts; None: all.
        dtype: float32 or float64.

    Raises:
        ValueError: no tokens, more rows than tokens, fewer than 1, or another dtype.
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
    """A matrix that is there already, in memory or as a memory map. Any real numbers will do: that
    exponentials of a row sum to 1 is not checked.

    Args:
        values: [N, V], floating point.
        rows: only the first; None: all.
        dtype, device: of its blocks; float32 or float64.

    Raises:
        ValueError: not floating point in two dimensions, empty, more rows than there are, fewer
            than 1, or another dtype.
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
    """How many rows are taken."""
    if rows is not None and not 1 <= rows <= available:
        raise ValueError(f"rows: expected 1 to {available:,} (the {what}), got {rows:,}")
    return available if rows is None else rows
