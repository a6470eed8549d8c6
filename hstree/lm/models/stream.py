"""Context vectors of a text that is read as one stream."""

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
        model: language model, in evaluation mode until the last window was read; its state starts
            at zero.
        tokens: classes of the text, [n], of any integer type; may be a memory map.
        length: number of steps that are computed together; the vectors do not depend on it.

    Raises:
        ValueError: if ``tokens`` are not integers in one dimension, or the length is below 1.

    Example:
        >>> import hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel, read_stream
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> [tuple(window.shape) for window in read_stream(model, range(10), length=4)]
        [(4, 16), (4, 16), (2, 16)]
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
    """The windows [t, D] of :func:`read_stream` with the words that follow, int64 [t].

    Every token of the text except the first is a target once.

    Args:
        model: language model, in evaluation mode until the last window was read.
        tokens: classes of the text, [n], n >= 2.
        length: number of steps that are computed together.

    Raises:
        ValueError: for fewer than 2 tokens, and the errors of :func:`read_stream`.

    Example:
        >>> import hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel, read_contexts
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> for hidden, target in read_contexts(model, range(4)):
        ...     print(tuple(hidden.shape), target.tolist())
        (3, 16) [1, 2, 3]
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens: expected at least 2, got {len(tokens)}")
    position = 1
    for hidden in read_stream(model, tokens[:-1], length=length):
        target = np.asarray(tokens[position : position + len(hidden)], np.int64)
        position += len(hidden)
        yield hidden, torch.from_numpy(target).to(hidden.device)
