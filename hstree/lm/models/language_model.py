"""A language model: a backbone that maps words to hidden vectors, and a head that maps hidden
vectors to probabilities of the next word."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from hstree.heads import Head, HeadOutput

from .awd_lstm import AWDLSTM, BackboneOutput, State


class LanguageModelOutput(NamedTuple):
    """Result of a language model for a window of words and the words after them.

    Attributes:
        head: result of the head: ``output``, log P of each target [time, B], and ``loss``.
        state: state after the last word, attached to the graph; see :func:`detach`.
        backbone: result of the backbone: the input of the head and of :func:`activation_penalty`.

    Example:
        >>> import torch, hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> output = model(torch.randint(100, (5, 2)), torch.randint(100, (5, 2)))
        >>> output.head.output.shape, output.head.loss.shape
        (torch.Size([5, 2]), torch.Size([]))
    """

    head: HeadOutput
    state: State
    backbone: BackboneOutput


class LanguageModel(nn.Module):
    """A backbone and a head: ``P(word_{t+1} | word_1, ..., word_t)``.

    Args:
        backbone: model that maps words to hidden vectors.
        head: head that maps hidden vectors to probabilities; ``head.in_features`` is
            ``backbone.out_features``.

    Raises:
        ValueError: if the sizes of the head differ from those of the backbone.

    Example:
        >>> import torch, hstree
        >>> from hstree.lm.models import AWDLSTM, LanguageModel, activation_penalty, detach
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> text = torch.randint(100, (11, 2))  # two streams of words
        >>> (log_prob, loss), state, read = model(text[0:5], text[1:6])
        >>> (loss + activation_penalty(read, alpha=2.0, beta=1.0)).backward()
        >>> (log_prob, loss), state, read = model(text[5:10], text[6:11], detach(state))
        >>> log_prob.shape
        torch.Size([5, 2])
    """

    def __init__(self, backbone: AWDLSTM, head: Head) -> None:
        super().__init__()
        if head.in_features != backbone.out_features:
            raise ValueError(
                f"head: expected in_features = {backbone.out_features} (backbone.out_features), "
                f"got {head.in_features}"
            )
        if head.n_classes != backbone.n_classes:
            raise ValueError(
                f"head: expected n_classes = {backbone.n_classes} (backbone.n_classes), "
                f"got {head.n_classes}"
            )
        self.backbone = backbone
        self.head = head

    def hidden(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Hidden vectors [time, B, D] of ``tokens`` int64 [time, B], and the state after the last
        token."""
        output: BackboneOutput = self.backbone(tokens, state)
        return output.hidden, output.state

    def forward(
        self, tokens: Tensor, target: Tensor, state: State | None = None
    ) -> LanguageModelOutput:
        """Log-probabilities of the targets, their loss, and the state.

        Args:
            tokens: words, int64 [time, B].
            target: the word after each token, int64 [time, B]; ``head.ignore_index`` where there is
                none.
            state: state before the first token; None: zero.
        """
        read: BackboneOutput = self.backbone(tokens, state)
        return LanguageModelOutput(self.head(read.hidden, target), read.state, read)
