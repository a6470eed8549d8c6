"""Whether a run fits into memory."""

from __future__ import annotations

import torch

from hstree._memory import available_memory, gibibytes
from hstree.runs import ConfigError, TrainConfig, parse_options

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
    head = _head_weights(config, n_classes, context)
    rows = min(config.batch_size * config.bptt, n_tokens) // config.accumulate
    kept = ACTIVATIONS * rows * sum(sizes)
    numbers = (weights + head) * (2 + STATES[config.optimizer]) + kept
    size = 4 * (numbers - head if config.sparse else numbers)
    if size > available:
        raise ConfigError(
            "expected a model whose weights, gradients and steps fit into memory, got one of at "
            f"least {gibibytes(size)}, where {gibibytes(available)} are available: make "
            "--embedding-size, --hidden-size, --context-size, --layers, --n-trees, --batch-size or "
            "--bptt smaller"
        )


def _head_weights(config: TrainConfig, n_classes: int, context: int) -> int:
    """At least so many weights has the head itself."""
    if config.head == "trees":
        features = 0 if config.tied else config.subset_size or context
        return n_classes * (features + config.n_trees)
    if config.tied or config.head == "adaptive":  # rare classes have fewer features, as cutoffs say
        return 0
    latent = parse_options(config.head_option).get("latent_features")
    return n_classes * (latent if isinstance(latent, int) and latent > 0 else context)
