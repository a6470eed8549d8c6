"""Recurrent language models: a backbone that turns words into hidden vectors, and a head that turns
those into probabilities of the next word."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hstree.data import windows
from hstree.heads import Head, HeadOutput

State: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, each [1, B, size of the layer]."""


class LSTMBackbone(nn.Module):
    """Embedding and LSTM layers, each of its own size, with dropout on the embeddings, between the
    layers and on the output.

        x_0 = dropout(E[words]),  x_l = dropout(LSTM_l(x_{l-1})) for l = 1 .. layers,  h = x_layers

    Args:
        n_classes: V, number of words.
        embedding_size: size of a word's vector.
        hidden_size: size of the state of every layer but the last.
        layers: number of LSTM layers.
        dropout: probability of dropping an element, in [0, 1).
        context_size: size of the last layer; default ``hidden_size``.
        all_layers: h is the concatenation of x_0 .. x_layers instead, for heads that read several
            layers (``Head.reads_layers``).

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).

    Example, the layers of AWD-LSTM::

        backbone = LSTMBackbone(10_000, 400, 1150, layers=3, context_size=400)
    """

    def __init__(
        self,
        n_classes: int,
        embedding_size: int,
        hidden_size: int,
        layers: int = 1,
        dropout: float = 0.0,
        *,
        context_size: int | None = None,
        all_layers: bool = False,
    ) -> None:
        super().__init__()
        if context_size is None:
            context_size = hidden_size
        sizes = {
            "n_classes": n_classes,
            "embedding_size": embedding_size,
            "hidden_size": hidden_size,
            "layers": layers,
            "context_size": context_size,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout: expected a probability in [0, 1), got {dropout}")
        self.n_classes = n_classes
        self.embedding_size = embedding_size
        self.hidden_size = hidden_size
        self.layers = layers
        self.dropout = dropout
        self.context_size = context_size
        self.all_layers = all_layers
        self.embedding = nn.Embedding(n_classes, embedding_size)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstms = nn.ModuleList(
            nn.LSTM(before, size) for before, size in pairwise(self.layer_sizes)
        )
        self.drop = nn.Dropout(dropout)

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Sizes of the embedding and of every layer."""
        hidden = (self.hidden_size,) * (self.layers - 1)
        return (self.embedding_size, *hidden, self.context_size)

    @property
    def out_features(self) -> int:
        """D, size of the hidden vectors."""
        return sum(self.layer_sizes) if self.all_layers else self.context_size

    def initial_state(self, batch_size: int) -> State:
        """Zero state for ``batch_size`` streams: for each layer two tensors [1, B, size]."""
        zeros = self.embedding.weight.new_zeros
        return tuple(
            (zeros(1, batch_size, size), zeros(1, batch_size, size))
            for size in self.layer_sizes[1:]
        )

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [time, B, D] of ``tokens`` int64 [time, B], and the state after the last
        of them."""
        if state is None:
            state = self.initial_state(tokens.shape[1])
        if len(state) != self.layers:
            raise ValueError(
                f"state: expected a pair (h, c) for each of {self.layers} layers, got {len(state)}"
            )
        outputs = [self.drop(self.embedding(tokens))]
        after: list[tuple[Tensor, Tensor]] = []
        for lstm, before in zip(self.lstms, state, strict=True):
            output, last = lstm(outputs[-1], before)
            outputs.append(self.drop(output))
            after.append(last)
        hidden = torch.cat(outputs, dim=-1) if self.all_layers else outputs[-1]
        return hidden, tuple(after)

    def config(self) -> dict[str, Any]:
        """Arguments that build this backbone again; JSON-able."""
        return {
            "kind": "lstm",
            "n_classes": self.n_classes,
            "embedding_size": self.embedding_size,
            "hidden_size": self.hidden_size,
            "layers": self.layers,
            "dropout": self.dropout,
            "context_size": self.context_size,
            "all_layers": self.all_layers,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LSTMBackbone:
        """Build the backbone of a :meth:`config`, with fresh weights. Raises ValueError for another
        kind."""
        arguments = dict(config)
        kind = arguments.pop("kind", None)
        if kind != "lstm":
            raise ValueError(f"backbone: expected the kind 'lstm', got {kind!r}")
        try:
            return cls(**arguments)
        except TypeError as error:
            raise ValueError(f"backbone: {error}") from None


class LanguageModel(nn.Module):
    """A backbone and any head: ``P(word_{t+1} | word_1 .. word_t)``.

    Args:
        backbone: turns words into hidden vectors.
        head: turns hidden vectors into probabilities; ``head.in_features`` is
            ``backbone.out_features``.

    Raises:
        ValueError: the head's sizes do not fit the backbone's.

    Example::

        backbone = LSTMBackbone(n_classes=10_000, embedding_size=200, hidden_size=200)
        model = LanguageModel(backbone, Softmax(200, 10_000))
        (log_prob, loss), state = model(tokens, targets)
        (log_prob, loss), state = model(next_tokens, next_targets, detach(state))
    """

    def __init__(self, backbone: LSTMBackbone, head: Head) -> None:
        super().__init__()
        if head.in_features != backbone.out_features:
            raise ValueError(
                f"head: expected in_features = {backbone.out_features} as the backbone gives, "
                f"got {head.in_features}"
            )
        if head.n_classes != backbone.n_classes:
            raise ValueError(
                f"head: expected n_classes = {backbone.n_classes} as the backbone has, "
                f"got {head.n_classes}"
            )
        self.backbone = backbone
        self.head = head

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [time, B, D] of ``tokens`` int64 [time, B], and the state after the last
        of them."""
        hidden, state = self.backbone(tokens, state)
        return hidden, state

    def forward(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[HeadOutput, State]:
        """Log-probabilities of the targets, their loss, and the state.

        Args:
            tokens: int64 [time, B].
            targets: int64 [time, B], the word after each token; ``head.ignore_index`` where there
                is none.
            state: state before the first token; None is zero.

        Returns:
            The head's output (``output``: log P of each target, ``loss``), and the state after the
            last token, still attached to the graph; see :func:`detach`.
        """
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden, targets), state


def detach(state: State) -> State:
    """The state without its history: where backpropagation through time is truncated."""
    return tuple((h.detach(), c.detach()) for h, c in state)


def parameter_count(module: nn.Module) -> int:
    """Number of elements of a module's distinct parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


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
            output, state = model(tokens, wanted, state)
            total -= float(output.output.sum(dtype=torch.float64))
            count += int((wanted != model.head.ignore_index).sum())
    finally:
        model.train(training)
    return total / max(count, 1)
