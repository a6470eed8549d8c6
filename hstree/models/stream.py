"""A text read as one stream, from its first word to its last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hstree._progress import track

from .awd_lstm import State
from .language_model import LanguageModel


@torch.no_grad()
def read_stream(model: LanguageModel, tokens: Any, *, length: int = 128) -> Iterator[Tensor]:
    """Context vectors after each of the n tokens of a text, in windows [t, D] with t <= ``length``.

    Args:
        model: in evaluation mode until the last window has been taken; its state begins at zero.
        tokens: class ids [n] of any integer type; may be a memory map.
        length: steps that are computed together; the vectors do not depend on it.

    Raises:
        ValueError: ``tokens`` are not integers in one dimension, or a length below 1.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"tokens: expected integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    if length < 1:
        raise ValueError(f"length: expected at least 1, got {length}")
    device = model.backbone.embedding.weight.device
    training = model.training
    state: State | None = None
    model.eval()
    try:
        starts = range(0, len(array), length)
        for start in track(starts, "reading the text", len(starts)):
            window = torch.from_numpy(array[start : start + length].astype(np.int64))
            hidden, state = model.hidden(window[:, None].to(device), state)
            yield hidden[:, 0]
    finally:
        model.train(training)


def read_contexts(
    model: LanguageModel, tokens: Any, *, length: int = 128
) -> Iterator[tuple[Tensor, Tensor]]:
    """The windows [t, D] of :func:`read_stream` with the words that follow [t], int64: every token
    of a text but the first is a target once.

    Args:
        model: in evaluation mode until the last window has been taken.
        tokens: class ids [n], n >= 2.
        length: steps that are computed together.

    Raises:
        ValueError: fewer than 2 tokens, or what :func:`read_stream` raises.
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens: expected at least 2, got {len(tokens)}")
    position = 1
    for hidden in read_stream(model, tokens[:-1], length=length):
        target = np.asarray(tokens[position : position + len(hidden)], np.int64)
        position += len(hidden)
        yield hidden, torch.from_numpy(target).to(hidden.device)
