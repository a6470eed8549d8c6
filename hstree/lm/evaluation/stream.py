"""Loss on a text that is read as one stream."""

from __future__ import annotations

from typing import Any

import torch

from hstree.lm.models import LanguageModel, read_contexts

from .cache import NeuralCache


@torch.no_grad()
def evaluate_stream(
    model: LanguageModel, tokens: Any, cache: NeuralCache | None = None, *, length: int = 128
) -> float:
    """Mean negative log-probability (nats per token) of a text that is read as one stream.

    Args:
        model: temporarily put in evaluation mode.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.
        cache: mixed into the model's probabilities, emptied first. Its hidden vectors are the
            outputs of the last layer, whatever the head reads.
        length: number of steps to compute together; the result does not depend on it.

    Raises:
        ValueError: fewer than 2 tokens, or a length below 1.
    """
    total = 0.0
    if cache is not None:
        cache.clear()
    for hidden, target in read_contexts(model, tokens, length=length):
        log_prob = model.head(hidden, target).output
        if cache is not None:
            log_prob = cache.mix(hidden[:, -model.backbone.context_size :], target, log_prob)
        total -= float(log_prob.sum(dtype=torch.float64))
    return total / (len(tokens) - 1)
