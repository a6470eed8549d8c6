"""The flat softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree.heads.base import Head, ParameterGroup
from hstree.heads.unigram import smoothed_frequencies

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.data.statistics import CorpusStatistics


class Softmax(Head):
    """P(y | h) = softmax(W h + b)[y].

    Equivalent to::

        logits = F.linear(hidden, weight, bias)
        output = -F.cross_entropy(logits, target, reduction="none")

    Args:
        in_features: D.
        n_classes: V.
        bias: whether there is a b.
        embedding: weight-tied embedding: its weight [V, D] serves as W.
        frequencies: counts [V]; b starts at their logarithm, so that with W = 0 the head is the
            unigram distribution. Without them b starts at 0.
        **options: those of :class:`Head`.

    W, unless tied, starts uniform in [-0.1, 0.1], as in AWD-LSTM.

    Example:
        >>> head = Softmax(400, 10000)
        >>> output, loss = head(torch.randn(32, 400), torch.randint(10000, (32,)))
    """

    name = "softmax"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        embedding: nn.Embedding | None = None,
        frequencies: np.ndarray[Any, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        self.tied = embedding is not None
        if embedding is not None:
            expected = (n_classes, in_features)
            if tuple(embedding.weight.shape) != expected:
                raise ValueError(
                    f"embedding: expected a weight of shape {expected} to tie to, "
                    f"got {tuple(embedding.weight.shape)}"
                )
            self.weight = embedding.weight
        else:
            self.weight = nn.Parameter(torch.empty(n_classes, in_features).uniform_(-0.1, 0.1))
        self.bias = nn.Parameter(torch.zeros(n_classes)) if bias else None
        if frequencies is not None and self.bias is not None:
            mass = smoothed_frequencies(frequencies, n_classes)
            with torch.no_grad():
                self.bias.copy_(torch.from_numpy(np.log(mass / mass.sum())))

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        return -F.cross_entropy(self._logits(hidden), target, ignore_index=-1, reduction="none")

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self._logits(hidden).log_softmax(-1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, V], in float32 or wider."""
        logits = F.linear(hidden, self.weight, self.bias)
        return logits if logits.dtype == torch.float64 else logits.float()

    def parameter_groups(self) -> list[ParameterGroup]:
        own = [p for p in self.parameters() if not (self.tied and p is self.weight)]
        return [ParameterGroup(own, self.learning_rate_factor)]

    def config(self) -> dict[str, Any]:
        return super().config() | {"bias": self.bias is not None, "tied": self.tied}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: nn.Embedding | None = None,
    ) -> Self:
        options = dict(config)
        tied = options.pop("tied")
        return cls(**options, embedding=embedding if tied else None)

    @classmethod
    def from_corpus(
        cls,
        in_features: int,
        n_classes: int,
        statistics: CorpusStatistics,
        *,
        embedding: nn.Embedding | None = None,
        seed: int = 0,
        tied: bool = False,
        **options: Any,
    ) -> Self:
        """A softmax whose bias starts at the unigram log-probabilities; ``tied=True`` ties it to
        the embedding."""
        if tied and embedding is None:
            raise ValueError("tied: expected an embedding to tie to, got None")
        return cls(
            in_features,
            n_classes,
            embedding=embedding if tied else None,
            frequencies=statistics.frequencies,
            **options,
        )
