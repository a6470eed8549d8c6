"""Loss of a language model over a text."""

from __future__ import annotations

import torch

from hstree._progress import track
from hstree.lm.data import Streams

from .awd_lstm import State
from .language_model import LanguageModel


@torch.no_grad()
def evaluate_loss(model: LanguageModel, streams: Streams, length: int = 128) -> float:
    """Mean negative log-probability (nats per token) of all targets that are not ignored.

    Args:
        model: language model, temporarily set to evaluation mode.
        streams: the text; positions without a target have the head's ``ignore_index``.
        length: number of steps that are computed together; the state is kept between windows.

    Returns:
        The mean; its exponential is the perplexity.

    Raises:
        ValueError: for a length below 1.

    Example:
        >>> import math, hstree
        >>> from hstree.lm.data import Streams
        >>> from hstree.lm.models import AWDLSTM, LanguageModel, evaluate_loss
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> loss = evaluate_loss(model, Streams(range(50), batch_size=2))
        >>> round(math.exp(loss)) in range(90, 110)  # perplexity of an untrained model
        True
    """
    device = model.backbone.embedding.weight.device
    training = model.training
    model.eval()
    total, count = 0.0, 0
    state: State | None = None
    try:
        n_windows = -(-len(streams) // length)
        for tokens, target in track(streams.windows(length), "evaluating", n_windows):
            (log_prob, _), state, _ = model(tokens.to(device), target.to(device), state)
            total -= float(log_prob.sum(dtype=torch.float64))
            count += int((target != model.head.ignore_index).sum())
    finally:
        model.train(training)
    return total / max(count, 1)
