"""A language model: a backbone that turns words into hidden vectors, and a head that turns those
into probabilities of the next word."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hstree.heads import Head, HeadOutput

from .awd_lstm import AWDLSTM, BackboneOutput, State


class LanguageModelOutput(NamedTuple):
    """What a language model makes of a window of words and the words after them.

    Attributes:
        head: ``output``, log P of each target [time, B], and ``loss``.
        state: after the last word, still attached to the graph; see :func:`detach`.
        backbone: what the head has read, and what :func:`activation_penalty` needs.
    """

    head: HeadOutput
    state: State
    backbone: BackboneOutput


class LanguageModel(nn.Module):
    """A backbone and any head: ``P(word_{t+1} | word_1, ..., word_t)``.

    Args:
        backbone: turns words into hidden vectors.
        head: turns hidden vectors into probabilities; ``head.in_features`` is
            ``backbone.out_features``.

    Raises:
        ValueError: the head's sizes do not fit the backbone's.

    Example::

        backbone = AWDLSTM(n_classes=10_000, embedding_size=200, hidden_size=200)
        model = LanguageModel(backbone, Softmax(200, 10_000))
        (log_prob, loss), state, read = model(tokens, target)
        (loss + activation_penalty(read, alpha=2.0, beta=1.0)).backward()
        (log_prob, loss), state, read = model(next_tokens, next_target, detach(state))
    """

    def __init__(self, backbone: AWDLSTM, head: Head) -> None:
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
        output: BackboneOutput = self.backbone(tokens, state)
        return output.hidden, output.state

    def forward(
        self, tokens: Tensor, target: Tensor, state: State | None = None
    ) -> LanguageModelOutput:
        """Log-probabilities of the targets, their loss, and the state.

        Args:
            tokens: int64 [time, B].
            target: int64 [time, B], the word after each token; ``head.ignore_index`` where there
                is none.
            state: state before the first token; None is zero.
        """
        read: BackboneOutput = self.backbone(tokens, state)
        return LanguageModelOutput(self.head(read.hidden, target), read.state, read)
