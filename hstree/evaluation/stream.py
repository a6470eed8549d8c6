"""A text read as one stream, from its first word to its last."""

from __future__ import annotations

from typing import Any

import torch

from hstree.data import Streams
from hstree.models import LanguageModel, State

from .cache import NeuralCache


@torch.no_grad()
def evaluate_stream(
    model: LanguageModel, tokens: Any, cache: NeuralCache | None = None, *, length: int = 128
) -> float:
    """Mean negative log-probability (nats per token) of a text that is read as one stream.

    Args:
        model: put in evaluation mode for the while.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.
        cache: mixed into the model's probabilities, emptied first. Its hidden vectors are the
            outputs of the last layer, whatever the head reads.
        length: steps that are computed together; the result does not depend on it.

    Raises:
        ValueError: fewer than 2 tokens, or a length below 1.
    """
    streams = Streams(tokens, 1, ignore_index=model.head.ignore_index)
    device = model.backbone.embedding.weight.device
    training = model.training
    total = 0.0
    state: State | None = None
    if cache is not None:
        cache.clear()
    model.eval()
    try:
        for inputs, targets in streams.windows(length):
            words, wanted = inputs.to(device), targets.to(device)
            hidden, state = model.hidden(words, state)
            log_prob = model.head(hidden, wanted).output.flatten()
            if cache is not None:
                last_layer = hidden[:, 0, -model.backbone.context_size :]
                log_prob = cache.mix(last_layer, wanted.flatten(), log_prob)
            total -= float(log_prob.sum(dtype=torch.float64))
    finally:
        model.train(training)
    return total / len(streams)
