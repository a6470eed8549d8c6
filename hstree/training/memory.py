"""Whether a run fits into memory."""

from __future__ import annotations

import torch

from hstree._memory import available_memory, gibibytes
from hstree.runs import ConfigError, TrainConfig

STATES = {"adamw": 2, "sgd": 0}
"""Numbers that an optimizer keeps for each weight."""
ACTIVATIONS = 8
"""Numbers that an LSTM layer keeps for each element of its output, for the backward pass."""


def check_memory(config: TrainConfig, n_classes: int, n_tokens: int, device: torch.device) -> None:
    """Raises ConfigError if the weights with their gradients and optimizer state, and what a step
    keeps of the LSTM, exceed the memory that is available. Rather less than what a run takes."""
    available = available_memory(device)
    if available is None:
        return
    context = config.context_size or config.hidden_size
    sizes = [*[config.hidden_size] * (config.layers - 1), context]
    inputs = [config.embedding_size, *sizes[:-1]]
    weights = n_classes * config.embedding_size
    weights += sum(4 * out * (into + out) for into, out in zip(inputs, sizes, strict=True))
    weights += 0 if config.tied else n_classes * context
    if config.head == "trees":
        weights += config.n_trees * n_classes
    rows = min(config.batch_size * config.bptt, n_tokens) // config.accumulate
    kept = ACTIVATIONS * rows * sum(sizes)
    size = 4 * (weights * (2 + STATES[config.optimizer]) + kept)
    if size > available:
        raise ConfigError(
            "expected a model whose weights, gradients and steps fit into memory, got one of at "
            f"least {gibibytes(size)}, where {gibibytes(available)} are available: make "
            "--embedding-size, --hidden-size, --context-size, --layers, --n-trees, --batch-size or "
            "--bptt smaller"
        )
