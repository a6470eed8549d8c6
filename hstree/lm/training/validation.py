"""Loss on validation and test text."""

from __future__ import annotations

from typing import Any

from hstree._checks import check_int
from hstree.lm.data import Streams
from hstree.lm.models import LanguageModel, evaluate_loss

MOST_STREAMS, SHORTEST_STREAM = 20, 50


def default_streams(n_tokens: int) -> int:
    """Number of streams in which a text of ``n_tokens`` is read: at most 20, of at least 50 targets
    each, or 1."""
    return max(1, min(MOST_STREAMS, (n_tokens - 1) // SHORTEST_STREAM))


def evaluate(model: LanguageModel, tokens: Any, streams: int | None = None) -> float:
    """Mean negative log-probability, in nats per token, of a text. Every token except the first is
    a target.

    Args:
        model: language model, temporarily set to evaluation mode.
        tokens: class ids, numpy [n], n >= 2.
        streams: number of parallel streams into which the text is cut. Each begins without context,
            so that a few of them are a little worse than one. Published perplexities are of 10
            streams of validation text and 1 of test text. None: at most 20, of at least 50 targets
            each, as training validates.

    Raises:
        ValueError: fewer than 2 tokens, or fewer targets than streams.

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
    return evaluate_loss(model, Streams(tokens, streams, ignore_index=model.head.ignore_index))
