"""The interface that every output layer shares."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hstree._checks import check_choice, check_int, check_number
from hstree._files import write_atomic
from hstree.ops import mark_targets

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.data.statistics import CorpusStatistics

REDUCTIONS = ("none", "sum", "mean")
METADATA_KEY = "hstree.head"


class HeadOutput(NamedTuple):
    """What a head returns, as :class:`torch.nn.AdaptiveLogSoftmaxWithLoss` does.

    Attributes:
        output: log-probability of each row's target, in nats, shape of ``target``; 0 for ignored
            rows.
        loss: negative log-likelihood after the head's ``reduction``.
    """

    output: Tensor
    loss: Tensor


class Head(nn.Module, ABC):
    """An output layer: a distribution over V classes for every context vector.

    ``forward(hidden, target)`` returns ``(output, loss)``; ``loss = head(hidden, target).loss``
    stands where ``F.cross_entropy(linear(hidden), target)`` stood. Leading dimensions of ``hidden``
    are free.

    Args:
        in_features: D, size of a context vector.
        n_classes: V, number of classes.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"mean"`` over the rows that are not ignored (NaN if there are none, as in
            :func:`torch.nn.functional.cross_entropy`), ``"sum"`` or ``"none"``.
        learning_rate_factor: factor on the model's learning rate for the head's own parameters.

    Raises:
        ValueError: for sizes below 1 or an unknown reduction.
    """

    name: ClassVar[str]
    reads_layers: ClassVar[bool] = False
    """Whether ``hidden`` is the concatenation of the word embedding and every layer's output;
    :meth:`from_corpus` then takes their sizes as ``layer_sizes``."""

    may_skip_parameters: ClassVar[bool] = False
    """Whether a batch may leave some parameters without a gradient."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        learning_rate_factor: float = 8.0,
    ) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.n_classes = check_int("n_classes", n_classes)
        self.ignore_index = int(ignore_index)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.learning_rate_factor = check_number(
            "learning_rate_factor", learning_rate_factor, positive=True
        )

    def forward(self, hidden: Tensor, target: Tensor) -> HeadOutput:
        """Log-probability of the targets and the loss.

        Args:
            hidden: [..., D], floating point.
            target: [...], int64, in [0, V) or ``ignore_index``. Anything else raises ValueError on
                the CPU. On a GPU, where looking would cost a synchronisation, the row becomes NaN;
                :class:`AdaptiveSoftmax`, which is torch's own, fails a device-side assertion.
        """
        if hidden.shape[:-1] != target.shape:
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
            )
        if target.dtype != torch.int64:
            raise ValueError(f"target: expected dtype torch.int64, got {target.dtype}")
        flat = mark_targets(target.reshape(-1), self.n_classes, self.ignore_index)
        output, loss = self.target_loss(self._encoded(hidden), flat)
        loss = loss.view(target.shape) if self.reduction == "none" else loss
        return HeadOutput(output.view(target.shape), loss)

    def encode(self, hidden: Tensor) -> Tensor:
        """What :meth:`target_loss` and the methods beside it read, [..., F]: hidden [..., D]. By
        default ``hidden`` itself."""
        return hidden

    @abstractmethod
    def target_loss(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability [N] of the targets, and the loss after the head's reduction.

        Args:
            hidden: what :meth:`encode` returns, [N, F].
            target: int64 [N], as :func:`hstree.ops.mark_targets` returns it: a class, -1 for a
                log-probability of 0 and no gradient, or V, on a GPU alone, for a row of NaN.
        """

    def reduced(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of log-probabilities [N]."""
        if self.reduction == "none":
            return -output
        loss = -output.sum()
        return loss / (target != -1).sum() if self.reduction == "mean" else loss

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, F], what :meth:`encode` returns."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable."""
        return self.class_log_prob(self._encoded(hidden)).view(*hidden.shape[:-1], self.n_classes)

    def predict(self, hidden: Tensor) -> Tensor:
        """Most probable class [...] of each row, int64: hidden [..., D]."""
        with torch.no_grad():
            return self.topk(hidden, 1)[1].squeeze(-1)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row, most probable first.

        Returns:
            log-probabilities [..., k], in nats and differentiable, and classes [..., k].

        Raises:
            ValueError: unless 1 <= k <= V.
        """
        if not 1 <= k <= self.n_classes:
            raise ValueError(f"k: expected 1 to {self.n_classes} (the number of classes), got {k}")
        values, classes = self.topk_rows(self._encoded(hidden), k)
        shape = (*hidden.shape[:-1], k)
        return values.view(shape), classes.view(shape)

    def topk_rows(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As :meth:`topk`, [N, k] each: hidden [N, F], what :meth:`encode` returns."""
        values, classes = self.class_log_prob(hidden).topk(k, dim=-1)
        return values, classes

    @torch.no_grad()
    def sample(self, hidden: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One class [...] drawn from each row's distribution, int64: hidden [..., D]."""
        return self.sample_rows(self._encoded(hidden), generator).view(hidden.shape[:-1])

    def sample_rows(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        """One class [N] drawn from each row's distribution: hidden [N, F], what :meth:`encode`
        returns."""
        if not len(hidden):
            return torch.empty(0, dtype=torch.int64, device=hidden.device)
        prob = self.class_log_prob(hidden).exp()
        return torch.multinomial(prob, 1, generator=generator).squeeze(1)

    def parameter_groups(
        self, lr: float, weight_decay: float = 0.01, *, decay_biases: bool = False
    ) -> list[dict[str, Any]]:
        """The head's parameters as :class:`torch.optim.AdamW` and other optimisers take them,
        :class:`hstree.optim.AdamW` also with row-sparse gradients.

        Biases, scales and every other parameter of one dimension have no weight decay; a tied
        embedding belongs to the groups of the model. Parameters that are frozen are left out.

        Args:
            lr: learning rate of the model; the head's is ``learning_rate_factor`` times that, but
                for a parameter with a rate of its own, the slopes of a PLIF.
            weight_decay: of the weights.
            decay_biases: decay biases and scales too, as published language models were trained;
                the parameters of a function of the logits never decay.

        Returns:
            Dicts of ``params``, ``lr`` and ``weight_decay``.

        Raises:
            ValueError: unless ``lr`` is a finite positive number and ``weight_decay`` a finite one
                of at least 0.

        Example:
            >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
            >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
        """
        lr = check_number("lr", lr, positive=True) * self.learning_rate_factor
        weight_decay = check_number("weight_decay", weight_decay)
        if weight_decay < 0:
            raise ValueError(f"weight_decay: expected a number of at least 0, got {weight_decay}")
        apart = {id(parameter) for parameter in self._apart()}
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in apart:
                is_weight = parameter.dim() > 1 and not name.endswith(("bias", "scale"))
                (decayed if is_weight or decay_biases else others).append(parameter)
        groups = ((decayed, weight_decay), (others, 0.0))
        return [{"params": p, "lr": lr, "weight_decay": decay} for p, decay in groups if p]

    def _apart(self) -> Iterable[Tensor]:
        """Parameters whose settings are not those of the head's own."""
        return ()

    def sparse_parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are row-sparse (``torch.sparse_coo``)."""
        return []

    def config(self) -> dict[str, Any]:
        """What :meth:`from_config` needs besides the tensors; JSON-able."""
        return {
            "in_features": self.in_features,
            "n_classes": self.n_classes,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "learning_rate_factor": self.learning_rate_factor,
        }

    @classmethod
    @abstractmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: nn.Embedding | None = None,
    ) -> Self:
        """A head that ``load_state_dict(tensors)`` fits.

        Args:
            config: from :meth:`config`.
            tensors: state dict of the saved head.
            embedding: what a tied head is tied to; without it the head gets a weight of its own.
        """

    @classmethod
    @abstractmethod
    def from_corpus(
        cls,
        in_features: int,
        n_classes: int,
        statistics: CorpusStatistics,
        *,
        embedding: nn.Embedding | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """A head for a training corpus.

        Args:
            in_features: D.
            n_classes: V.
            statistics: class frequencies and word vectors of the corpus.
            embedding: the model's input embedding, for heads that are asked to tie to it.
            seed: of whatever is random beside the parameters, such as trees.
            options: keyword arguments of the head.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the head to one safetensors file, its configuration in the metadata; atomic.

        :func:`hstree.heads.load_head` reads it.
        """
        tensors = {
            key: value.detach().contiguous().cpu() for key, value in self.state_dict().items()
        }
        metadata = {METADATA_KEY: json.dumps({"name": self.name, "config": self.config()})}
        write_atomic(Path(path), lambda part: save_file(tensors, part, metadata))

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, n_classes={self.n_classes}, "
            f"reduction={self.reduction!r}"
        )

    def _encoded(self, hidden: Tensor) -> Tensor:
        if hidden.ndim < 1 or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape [..., {self.in_features}], got {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")
        hidden = self.encode(hidden)
        return hidden.reshape(-1, hidden.shape[-1])
