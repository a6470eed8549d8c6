"""Loss of a language model over a text."""

from __future__ import annotations

import torch

from hstree._progress import track
from hstree.data import Streams

from .awd_lstm import State
from .language_model import LanguageModel


@torch.no_grad()
def evaluate_loss(model: LanguageModel, streams: Streams, length: int = 128) -> float:
    """Mean negative log-probability (nats per token) of all targets that are not ignored.

    Args:
        model: put in evaluation mode for the while.
        streams: the text; places without a target hold the head's ``ignore_index``.
        length: steps that are computed together; the state runs on over them.

    Raises:
        ValueError: ``length`` < 1.
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
