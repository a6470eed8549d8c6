"""Loss on validation and test text."""

from __future__ import annotations

from typing import Any

import torch

from hstree._checks import check_int
from hstree._progress import track
from hstree.lm.data import Streams
from hstree.lm.models import LanguageModel, State

MOST_STREAMS, SHORTEST_STREAM = 20, 50


def default_streams(n_tokens: int) -> int:
    """Number of streams of a text: at most 20, of at least 50 targets each, or 1."""
    return max(1, min(MOST_STREAMS, (n_tokens - 1) // SHORTEST_STREAM))


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    tokens: Any,
    streams: int | None = None,
    *,
    length: int = 128,
    n_targets: int | None = None,
) -> float:
    """Mean negative log-probability, in nats per token, of a text or an evenly spread part of it.
    Every token except the first is a target.

    Args:
        model: language model, temporarily set to evaluation mode.
        tokens: class ids, numpy [n], n >= 2.
        streams: number of parallel streams into which the text is cut. Each begins without context,
            so that a few of them are a little worse than one. Published perplexities are of 10
            streams of validation text and 1 of test text. None: at most 20, of at least 50 targets
            each, as training validates.
        length: number of steps that are computed together; the state is kept between windows.
        n_targets: number of targets to score, rounded up to a multiple of ``streams``: those at the
            beginning of each stream. They have the loss that they have in the whole. None: all.

    Raises:
        ValueError: fewer than 2 tokens, fewer targets than streams, or a length or number of
            targets below 1.

    Example:
        >>> import math, hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel
        >>> from hstree.lm.training import evaluate
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> round(math.exp(evaluate(model, range(50), streams=2))) in range(90, 110)
        True
    """
    if streams is None:
        streams = default_streams(len(tokens))
    else:
        streams = check_int("streams", streams, 1, max(len(tokens) - 1, 1))
    text = Streams(tokens, streams, ignore_index=model.head.ignore_index)
    steps = len(text)
    if n_targets is not None:
        steps = min(steps, -(-check_int("n_targets", n_targets) // streams))
    device = model.backbone.embedding.weight.device
    training = model.training
    model.eval()
    total, count = 0.0, 0
    state: State | None = None
    try:
        windows = text.windows(length, steps)
        for window, target in track(windows, "evaluating", -(-steps // length)):
            (log_prob, _), state, _ = model(window.to(device), target.to(device), state)
            total -= float(log_prob.sum(dtype=torch.float64))
            count += int((target != model.head.ignore_index).sum())
    finally:
        model.train(training)
    return total / max(count, 1)
