"""Recurrent language models: a backbone that turns words into hidden vectors, and a head that turns
those into probabilities of the next word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hstree.data import windows
from hstree.heads import Head, HeadOutput

State: TypeAlias = tuple[Tensor, Tensor]


class LSTMBackbone(nn.Module):
    """Embedding and LSTM, with dropout on the embeddings, between the layers and on the output.

        x_t = dropout(E[word_t]),  h_t = dropout(LSTM(x_t, h_{t-1}))

    Args:
        n_classes: V, number of words.
        embedding_size: size of a word's vector.
        hidden_size: size of the LSTM's state in every layer, and D of the hidden vectors.
        layers: number of LSTM layers.
        dropout: probability of dropping an element, in [0, 1).

    Raises:
        ValueError: a size below 1, or a dropout outside [0, 1).
    """

    def __init__(
        self,
        n_classes: int,
        embedding_size: int,
        hidden_size: int,
        layers: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = {
            "n_classes": n_classes,
            "embedding_size": embedding_size,
            "hidden_size": hidden_size,
            "layers": layers,
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
        self.embedding = nn.Embedding(n_classes, embedding_size)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstm = nn.LSTM(
            embedding_size, hidden_size, layers, dropout=dropout if layers > 1 else 0.0
        )
        self.drop = nn.Dropout(dropout)

    @property
    def out_features(self) -> int:
        """D, size of the hidden vectors."""
        return self.hidden_size

    def initial_state(self, batch_size: int) -> State:
        """Zero state for ``batch_size`` streams: two tensors [layers, B, hidden]."""
        shape = (self.layers, batch_size, self.hidden_size)
        return self.embedding.weight.new_zeros(shape), self.embedding.weight.new_zeros(shape)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [time, B, D] of ``tokens`` int64 [time, B], and the state after the last
        of them."""
        if state is None:
            state = self.initial_state(tokens.shape[1])
        hidden, state = self.lstm(self.drop(self.embedding(tokens)), state)
        return self.drop(hidden), state

    def config(self) -> dict[str, Any]:
        """Arguments that build this backbone again; JSON-able."""
        return {
            "kind": "lstm",
            "n_classes": self.n_classes,
            "embedding_size": self.embedding_size,
            "hidden_size": self.hidden_size,
            "layers": self.layers,
            "dropout": self.dropout,
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
    return state[0].detach(), state[1].detach()


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
