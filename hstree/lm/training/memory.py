"""Whether a run fits into memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hstree._memory import available_memory, gibibytes
from hstree.heads import build_head, head_class
from hstree.lm.runs import ConfigError, TrainConfig

from .build import own_parameter_count

STATES = {"adamw": 2, "sgd": 0}
"""Numbers that an optimizer keeps for each weight."""
ACTIVATIONS = 8
"""Numbers that an LSTM layer keeps for each element of its output, for the backward pass."""
_TOO_MANY = 2**62
"""Weights of a head with a tensor of more numbers than 64 bits can count."""


def check_memory(config: TrainConfig, n_classes: int, n_tokens: int, device: torch.device) -> None:
    """Raises ConfigError if the weights with their gradients and optimizer state, and what a step
    keeps of the LSTM, exceed the memory that is available. Rather less than what a run takes."""
    available = available_memory(device)
    if available is None:
        return
    context = config.context_size or config.hidden_size
    sizes = [*[config.hidden_size] * (config.layers - 1), context]
    inputs = [config.embedding_size, *sizes[:-1]]
    embedding = n_classes * config.embedding_size
    weights = embedding
    weights += sum(4 * out * (into + out) for into, out in zip(inputs, sizes, strict=True))
    head = _head_weights(config, n_classes, context)
    rows = min(config.batch_size * config.bptt, n_tokens) // config.accumulate
    kept = ACTIVATIONS * rows * sum(sizes)
    numbers = (weights + head) * (2 + STATES[config.optimizer]) + kept
    # A row-sparse gradient has few rows.
    numbers -= head * config.sparse + embedding * config.sparse_embedding
    size = 4 * numbers
    if size > available:
        raise ConfigError(
            "expected a model whose weights, gradients and steps fit into memory, got one of at "
            f"least {gibibytes(size)}, where {gibibytes(available)} are available: make "
            "--embedding-size, --hidden-size, --context-size, --layers, --n-trees, --batch-size, "
            "--bptt, or sizes in --head-option, smaller"
        )


class _Uninitialized(TorchFunctionMode):
    """Leaves out what takes torch two seconds when it is first called on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.init.normal_:
            return (*args, *(kwargs or {}).values())[0]
        return func(*args, **(kwargs or {}))


def _head_weights(config: TrainConfig, n_classes: int, context: int) -> int:
    """At least so many weights has the head itself."""
    if config.head == "trees":  # to build it takes its trees
        features = 0 if config.tied else config.subset_size or context
        return n_classes * (features + config.n_trees)
    embedding, layers = config.embedding_size, config.layers - 1
    sizes = (embedding, *[config.hidden_size] * layers, context)
    head_type = head_class(config.head)
    of_layers: dict[str, Any] = {"layer_sizes": sizes} if head_type.reads_layers else {}
    features = sum(sizes) if head_type.reads_layers else context
    try:
        with torch.device("meta"), _Uninitialized():  # takes no memory
            tied = nn.Embedding(n_classes, embedding, _weight=torch.empty(n_classes, embedding))
            head = build_head(
                config.head,
                features,
                n_classes,
                frequencies=np.ones(n_classes),
                embedding=tied if config.tied else None,
                **of_layers,
                **config.head_options(),
            )
    except Exception as error:  # building the model will say what is wrong
        return _TOO_MANY if "overflow" in str(error).lower() else 0
    return own_parameter_count(head, tied)
