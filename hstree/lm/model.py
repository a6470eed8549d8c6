"""The AWD-LSTM, the language model that joins it with a head, and the contexts of a text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from inspect import signature
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_bool, check_int, check_nonnegative, check_probability
from hstree._progress import track
from hstree.heads import Head, HeadOutput

__all__ = [
    "AWDLSTM",
    "BackboneOutput",
    "LanguageModel",
    "LanguageModelOutput",
    "State",
    "activation_penalty",
    "detach",
    "read_contexts",
    "read_stream",
]

# AWD-LSTM: word embeddings and LSTM layers, regularized by dropout.

State: TypeAlias = tuple[tuple[Tensor, Tensor], ...]
"""(h, c) of every layer, each [1, B, size of the layer]."""


class BackboneOutput(NamedTuple):
    """Result of a backbone for a window of words.

    Attributes:
        hidden: input of the head, [time, B, D].
        state: state after the last word, attached to the graph; see :func:`detach`.
        raw: output of the last layer before dropout, [time, B, context_size].
        dropped: output of the last layer after dropout, [time, B, context_size].

    Example:
        >>> import torch
        >>> from hstree.lm.model import AWDLSTM
        >>> AWDLSTM(100, 8, 16)(torch.randint(100, (5, 2))).hidden.shape
        torch.Size([5, 2, 16])
    """

    hidden: Tensor
    state: State
    raw: Tensor
    dropped: Tensor


class AWDLSTM(nn.Module):
    r"""Embedding and LSTM layers with dropout between them and DropConnect within them.

    .. math::
        x_0 = m_{\mathrm{input}} \odot (E'[\mathrm{words}] + \sigma \varepsilon), \quad
        x_l = m_l \odot \mathrm{LSTM}_l(x_{l-1}), \quad l = 1 \ldots \mathrm{layers}, \quad
        h = x_{\mathrm{layers}}

    E' is E without the rows of dropped words, and the hidden-to-hidden matrix of every layer is
    :math:`M_l \odot W_{hh}`. The masks m are [1, B, size], the same at all time steps ("locked").
    In training mode every call draws new masks. An element of a mask is 1 / (1 - p) with
    probability 1 - p, else 0. The noise :math:`\varepsilon` is normal and independent for every
    element of [time, B, size]. In evaluation mode there are no masks, no scaling and no noise.

    Under autocast on a CPU without LSTM layers of that precision (``cpu_has_lstm``) the LSTM
    layers compute in the dtype of their weights.

    Args:
        n_classes: number of words, V.
        embedding_size: size of a word's vector.
        hidden_size: size of every layer except the last.
        layers: number of LSTM layers.
        context_size: size of the last layer; None: ``hidden_size``.
        dropout, dropout_input, dropout_hidden: probability of dropping an element of the last
            layer's output, of the embedded words, and of the output of the other layers; locked.
        dropout_embedding: probability of dropping a word, in the whole window.
        weight_dropout: probability of dropping a hidden-to-hidden weight, for the whole window. The
            parameters are those of :class:`torch.nn.LSTM`; a dropped weight gets no gradient.
        embedding_noise: standard deviation of the noise on the embedded words, sigma.
        sparse_embedding: whether the gradient of E is row-sparse, with the rows of the window's
            words: for :class:`hstree.optim.AdamW`, whose step then does not grow with V.

    Raises:
        ValueError: for a size below 1, a probability outside [0, 1), or a negative deviation.

    Example:
        The model of the paper on Penn Treebank:

        >>> from hstree.lm.model import AWDLSTM
        >>> backbone = AWDLSTM(
        ...     10_000, 400, 1150, layers=3, context_size=400, dropout=0.4, dropout_input=0.4,
        ...     dropout_hidden=0.25, dropout_embedding=0.1, weight_dropout=0.5,
        ... )
        >>> backbone.layer_sizes
        (400, 1150, 1150, 400)

    Source: Merity, Keskar and Socher, Regularizing and optimizing LSTM language models, ICLR 2018.
    The noise is that of Wang, Gong and Liu, Improving neural language modeling via adversarial
    training, ICML 2019, and its code.
    """

    def __init__(
        self,
        n_classes: int,
        embedding_size: int,
        hidden_size: int,
        layers: int = 1,
        *,
        context_size: int | None = None,
        dropout: float = 0.0,
        dropout_input: float = 0.0,
        dropout_hidden: float = 0.0,
        dropout_embedding: float = 0.0,
        weight_dropout: float = 0.0,
        embedding_noise: float = 0.0,
        sparse_embedding: bool = False,
    ) -> None:
        super().__init__()
        self.n_classes = check_int("n_classes", n_classes)
        self.embedding_size = check_int("embedding_size", embedding_size)
        self.hidden_size = check_int("hidden_size", hidden_size)
        self.layers = check_int("layers", layers)
        context_size = hidden_size if context_size is None else context_size
        self.context_size = check_int("context_size", context_size)
        self.dropout = check_probability("dropout", dropout)
        self.dropout_input = check_probability("dropout_input", dropout_input)
        self.dropout_hidden = check_probability("dropout_hidden", dropout_hidden)
        self.dropout_embedding = check_probability("dropout_embedding", dropout_embedding)
        self.weight_dropout = check_probability("weight_dropout", weight_dropout)
        self.embedding_noise = check_nonnegative("embedding_noise", embedding_noise)
        sparse = check_bool("sparse_embedding", sparse_embedding)
        self.embedding = nn.Embedding(n_classes, embedding_size, sparse=sparse)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.lstms = nn.ModuleList(
            nn.LSTM(before, size) for before, size in pairwise(self.layer_sizes)
        )

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        """Sizes of the embedding and of every layer."""
        hidden = (self.hidden_size,) * (self.layers - 1)
        return (self.embedding_size, *hidden, self.context_size)

    @property
    def out_features(self) -> int:
        """Size of the hidden vectors, D."""
        return self.context_size

    def initial_state(self, batch_size: int) -> State:
        """Zero state of ``batch_size`` streams: for each layer two tensors [1, B, size]."""
        zeros = self.embedding.weight.new_zeros
        shapes = [(1, batch_size, size) for size in self.layer_sizes[1:]]
        return tuple((zeros(shape), zeros(shape)) for shape in shapes)

    def forward(self, tokens: Tensor, state: State | None = None) -> BackboneOutput:
        """Read a window of words.

        Args:
            tokens: words, int64 [time, B].
            state: state before the first word; None: zero.

        Raises:
            ValueError: if the state is not a pair (h, c) of [1, B, size] for each layer.
        """
        if state is None:
            state = self.initial_state(tokens.shape[1])
        expected = [((1, tokens.shape[1], size),) * 2 for size in self.layer_sizes[1:]]
        shapes = [tuple(tuple(part.shape) for part in pair) for pair in state]
        if shapes != expected:
            raise ValueError(f"state: expected (h, c) of each layer of {expected}, got {shapes}")
        output = _locked_dropout(self._embed(tokens), self.dropout_input, self.training)
        after: list[tuple[Tensor, Tensor]] = []
        dropouts = [self.dropout_hidden] * (self.layers - 1) + [self.dropout]
        for lstm, before, dropout in zip(self.lstms, state, dropouts, strict=True):
            raw, last = _run(lstm, output, before, self.weight_dropout)
            output = _locked_dropout(raw, dropout, self.training)
            after.append(last)
        return BackboneOutput(output, tuple(after), raw, output)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(tokens)
        if self.training and self.dropout_embedding:
            mask = F.dropout(embedded.new_ones(self.n_classes, 1), self.dropout_embedding)
            embedded = embedded * mask[tokens]
        if self.training and self.embedding_noise:
            embedded = embedded + self.embedding_noise * torch.randn_like(embedded)
        return embedded

    def config(self) -> dict[str, Any]:
        """Arguments that build this backbone again, serializable as JSON."""
        arguments = [name for name in signature(type(self)).parameters if name in vars(self)]
        config = {name: getattr(self, name) for name in arguments}
        return {"kind": "awd-lstm", **config, "sparse_embedding": self.embedding.sparse}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> AWDLSTM:
        """Build the backbone of a :meth:`config`, with new weights. Raises ValueError for another
        kind of backbone."""
        arguments = dict(config)
        kind = arguments.pop("kind", None)
        if kind != "awd-lstm":
            raise ValueError(f"backbone: expected the kind 'awd-lstm', got {kind!r}")
        try:
            return cls(**arguments)
        except TypeError as error:
            raise ValueError(f"backbone: {error}") from None


def activation_penalty(output: BackboneOutput, alpha: float = 0.0, beta: float = 0.0) -> Tensor:
    r"""Activation regularization: a penalty for large activations and large changes in time.

    .. math::
        \alpha \, \mathrm{mean}\bigl((m \odot h_t)^2\bigr) +
        \beta \, \mathrm{mean}\bigl((h_t - h_{t-1})^2\bigr)

    The means are over all elements of the last layer's output h. The first term has the dropout
    mask m. The second term has no mask, and is 0 for a window of one step.

    Args:
        output: result of :class:`AWDLSTM`.
        alpha: weight of the activations, finite and not negative.
        beta: weight of the changes in time, finite and not negative.

    Returns:
        The penalty, a scalar tensor, float32 for outputs of lower precision.

    Example:
        >>> import torch
        >>> from hstree.lm.model import AWDLSTM, activation_penalty
        >>> output = AWDLSTM(100, 8, 16)(torch.randint(100, (5, 2)))
        >>> activation_penalty(output, alpha=2.0, beta=1.0).shape
        torch.Size([])

    Source: Merity, McCann and Socher, Revisiting activation regularization for language RNNs, 2017.
    """
    check_nonnegative("alpha", alpha)
    check_nonnegative("beta", beta)
    dtype = torch.promote_types(output.raw.dtype, torch.float32)
    raw, dropped = output.raw.to(dtype), output.dropped.to(dtype)
    penalty = raw.new_zeros(())
    if alpha:
        penalty = penalty + alpha * dropped.square().mean()
    if beta and len(raw) > 1:
        penalty = penalty + beta * (raw[1:] - raw[:-1]).square().mean()
    return penalty


def detach(state: State) -> State:
    """The state detached from the graph, to truncate backpropagation through time.

    Example:
        >>> import torch
        >>> from hstree.lm.model import AWDLSTM, detach
        >>> state = AWDLSTM(100, 8, 16)(torch.randint(100, (5, 2))).state
        >>> state[0][0].requires_grad, detach(state)[0][0].requires_grad
        (True, False)
    """
    return tuple((h.detach(), c.detach()) for h, c in state)


@functools.cache
def cpu_has_lstm(dtype: torch.dtype) -> bool:
    """Whether an LSTM layer of torch can be trained on this CPU under autocast to a dtype.

    oneDNN computes the layer under autocast. It has no bfloat16 LSTM for x86 processors without
    AVX-512. The function tries a layer of one unit, once per process, without random numbers.
    """
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", dtype):
        layer = nn.LSTM(1, 1, device="meta").to_empty(device="cpu")
        try:
            layer(torch.zeros(1, 1, 1))[0].sum().backward()
        except RuntimeError:
            return False
    return True


def _locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all time steps: x [time, B, size]."""
    if not (training and p):
        return x
    return x * F.dropout(x.new_ones(1, *x.shape[1:]), p)


def _run(
    lstm: nn.Module, x: Tensor, state: tuple[Tensor, Tensor], weight_dropout: float
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Output and last state of a :class:`torch.nn.LSTM` of one layer, with DropConnect in training.

    The weights are passed as arguments, so that no module holds a dropped copy.
    """
    weight_ih, weight_hh, bias_ih, bias_hh = lstm.parameters()
    lowered = x.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    if lowered and not cpu_has_lstm(torch.get_autocast_dtype("cpu")):
        h, c = (part.to(weight_hh.dtype) for part in state)
        with torch.autocast("cpu", enabled=False):
            return _run(lstm, x.to(weight_hh.dtype), (h, c), weight_dropout)
    weights: list[Tensor] = [weight_ih, weight_hh, bias_ih, bias_hh]
    if lstm.training and weight_dropout:
        weights[1] = F.dropout(weight_hh, weight_dropout)
        if x.is_cuda:
            weights = _one_block(weights)
    keep = torch.is_grad_enabled()  # cuDNN keeps its workspace for the backward pass
    # has_biases, num_layers, dropout, train, bidirectional, batch_first
    output, h, c = torch.lstm(x, state, weights, True, 1, 0.0, keep, False, False)
    return output, (h, c)


def _one_block(weights: list[Tensor]) -> list[Tensor]:
    """The weights in one contiguous block of memory. Without it cuDNN warns and copies them."""
    block = torch.cat([weight.reshape(-1) for weight in weights])
    parts = torch.split(block, [weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


# A language model: a backbone that maps words to hidden vectors, and a head that maps hidden
# vectors to probabilities of the next word.


class LanguageModelOutput(NamedTuple):
    """Result of a language model for a window of words and the words after them.

    Attributes:
        head: result of the head: ``output``, log P of each target [time, B], and ``loss``.
        state: state after the last word, attached to the graph; see :func:`detach`.
        backbone: result of the backbone: the input of the head and of :func:`activation_penalty`.

    Example:
        >>> import torch, hstree
        >>> from hstree.lm.model import AWDLSTM, LanguageModel
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> model(torch.randint(100, (5, 2)), torch.randint(100, (5, 2))).head.output.shape
        torch.Size([5, 2])
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
        >>> from hstree.lm.model import AWDLSTM, LanguageModel, activation_penalty, detach
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
        expected = {"in_features": backbone.out_features, "n_classes": backbone.n_classes}
        for name, size in expected.items():
            if getattr(head, name) != size:
                raise ValueError(
                    f"head: expected {name} = {size}, as the backbone has, "
                    f"got {getattr(head, name)}"
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


# Context vectors of a text that is read as one stream.


@torch.no_grad()
def read_stream(model: LanguageModel, tokens: Any, *, length: int = 128) -> Iterator[Tensor]:
    """Context vectors after each of the n tokens of a text, in windows [t, D] with t <= ``length``.

    Args:
        model: language model, in evaluation mode until the last window was read; its state starts
            at zero.
        tokens: classes of the text, [n], of any integer type; may be a memory map.
        length: number of steps that are computed together; the vectors do not depend on it.

    Raises:
        ValueError: if ``tokens`` are not integers in one dimension, or the length is below 1.

    Example:
        >>> import hstree
        >>> from hstree.lm.model import AWDLSTM, LanguageModel, read_stream
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> [tuple(window.shape) for window in read_stream(model, range(10), length=4)]
        [(4, 16), (4, 16), (2, 16)]
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
        raise ValueError(
            f"tokens: expected integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    check_int("length", length)
    device = model.backbone.embedding.weight.device
    training = model.training
    state: State | None = None
    model.eval()
    try:
        starts = range(0, len(array), length)
        for start in track(starts, "reading the text", len(starts)):
            window = torch.from_numpy(array[start : start + length].astype(np.int64))
            hidden, state = model.hidden(window[:, None].to(device), state)
            yield hidden[:, 0]
    finally:
        model.train(training)


def read_contexts(
    model: LanguageModel, tokens: Any, *, length: int = 128
) -> Iterator[tuple[Tensor, Tensor]]:
    """The windows [t, D] of :func:`read_stream` with the words that follow, int64 [t]: every token
    of the text except the first. Arguments and errors are those of :func:`read_stream`; n >= 2.

    Example:
        >>> import hstree
        >>> from hstree.lm.model import AWDLSTM, LanguageModel, read_contexts
        >>> model = LanguageModel(AWDLSTM(100, 8, 16), hstree.Softmax(16, 100))
        >>> for hidden, target in read_contexts(model, range(4)):
        ...     print(tuple(hidden.shape), target.tolist())
        (3, 16) [1, 2, 3]
    """
    if len(tokens) < 2:
        raise ValueError(f"tokens: expected at least 2, got {len(tokens)}")
    position = 1
    for hidden in read_stream(model, tokens[:-1], length=length):
        target = np.asarray(tokens[position : position + len(hidden)], np.int64)
        position += len(hidden)
        yield hidden, torch.from_numpy(target).to(hidden.device)
