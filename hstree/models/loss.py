"""Loss of a language model over a text."""

from __future__ import annotations

import torch
from torch import Tensor

from hstree.data import windows

from .awd_lstm import State
from .language_model import LanguageModel


@torch.no_grad()
def evaluate_loss(
    model: LanguageModel, inputs: Tensor, targets: Tensor, length: int = 128
) -> float:
    """Mean negative log-probability (nats per token) of all targets that are not ignored.

    Args:
        model: put in evaluation mode for the while.
        inputs, targets: int64 [L, B] of :func:`hstree.data.batchify`; the state runs on over
            windows of ``length`` steps.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0
    state: State | None = None
    try:
        for tokens, wanted in windows(inputs, targets, length):
            (log_prob, _), state, _ = model(tokens, wanted, state)
            total -= float(log_prob.sum(dtype=torch.float64))
            count += int((wanted != model.head.ignore_index).sum())
    finally:
        model.train(training)
    return total / max(count, 1)
