"""The interface that every output layer shares."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hstree._checks import check_choice, check_int, check_number, check_probability
from hstree._files import write_atomic
from hstree.heads.buffers import Resettable
from hstree.heads.losses import by_rows, check_class_weight
from hstree.heads.parameters import HeadParameters
from hstree.heads.sharding import register_forward_methods
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
            rows. No option of the loss changes it: perplexities come from here.
        loss: what is minimised, after the head's ``reduction``: the negative log-likelihood, with
            class weights, label smoothing and z-loss where the head has them.
    """

    output: Tensor
    loss: Tensor


class Head(HeadParameters, Resettable, ABC):
    r"""An output layer: a distribution over V classes for every context vector.

    ``forward(hidden, target)`` returns ``(output, loss)``; ``loss = head(hidden, target).loss``
    stands where ``F.cross_entropy(linear(hidden), target)`` stood, with its class weights
    :math:`c` (there ``weight``) and its label smoothing :math:`\epsilon`:

    .. math::
        \ell_n = -(1 - \epsilon)\, c_{y_n} \log p_{n y_n}
        - \frac{\epsilon}{V} \sum_v c_v \log p_{nv}

    Leading dimensions of ``hidden`` are free, and so is its floating-point dtype: it is cast to
    that of the weights, but under autocast, which decides itself. Losses and log-probabilities are
    float32, or float64 for weights in float64.

    Args:
        in_features: D, size of a context vector.
        n_classes: V, number of classes.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"mean"`` over the rows that are not ignored (NaN if there are none, as in
            :func:`torch.nn.functional.cross_entropy`), ``"sum"`` or ``"none"``. With class weights
            the mean is weighted: it divides by the sum of the targets' weights.
        learning_rate_factor: factor on the model's learning rate for the head's own parameters.
        class_weight: c [V], at least 0; None: all 1. A buffer, saved with the head.
        label_smoothing: epsilon in [0, 1). Heads whose scores are W e + b (softmax, moc) know the
            mean over the classes without logits; others compute the log-probabilities of all
            classes, in chunks of rows: O(N V) time, for trees too.
        z_loss: coefficient of (log Z)^2, Z the normaliser of the row's softmax, added to each row
            that is not ignored; not weighted by class. Only for heads with one normaliser: not for
            mixtures of softmaxes, trees and the adaptive softmax. Chowdhery et al., PaLM, 2022.

    Raises:
        ValueError: for sizes below 1, an unknown reduction, an option out of range or one that the
            head does not have.
    """

    name: ClassVar[str]
    reads_layers: ClassVar[bool] = False
    """Whether ``hidden`` is the concatenation of the word embedding and every layer's output;
    :meth:`from_corpus` then takes their sizes as ``layer_sizes``."""

    may_skip_parameters: ClassVar[bool] = False
    """Whether a batch may leave some parameters without a gradient."""

    no_z_loss: ClassVar[str | None] = "it has no target_score"
    """Why the head cannot have a z-loss. None if it can, which needs :meth:`target_score`."""

    class_weight: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        register_forward_methods(cls, ("log_prob", "entropy", "topk", "predict", "sample"))

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        learning_rate_factor: float = 8.0,
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.n_classes = check_int("n_classes", n_classes)
        self.ignore_index = int(ignore_index)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.learning_rate_factor = check_number(
            "learning_rate_factor", learning_rate_factor, positive=True
        )
        self.register_constant("class_weight", check_class_weight(class_weight, self.n_classes))
        self.label_smoothing = check_probability("label_smoothing", label_smoothing)
        self.z_loss = check_number("z_loss", z_loss)
        if self.z_loss < 0:
            raise ValueError(f"z_loss: expected a number of at least 0, got {z_loss}")
        if self.z_loss and self.no_z_loss:
            raise ValueError(
                f"z_loss: expected 0 for the head {self.name!r}, as {self.no_z_loss}, got "
                f"{z_loss}; heads with one normaliser take it, such as 'softmax'"
            )

    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, target: Tensor) -> HeadOutput: ...

    def forward(self, hidden: Tensor, target: Tensor) -> HeadOutput:
        """Log-probability of the targets and the loss.

        Args:
            hidden: [..., D], floating point.
            target: [...], int64, in [0, V) or ``ignore_index``. Anything else raises ValueError on
                the CPU, RuntimeError under torch.func or torch.compile. On a GPU, where looking
                would cost a synchronisation, the row becomes NaN; :class:`AdaptiveSoftmax`, which
                is torch's own, fails a device-side assertion.
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
    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N] of the targets.

        Args:
            hidden: what :meth:`encode` returns, [N, F].
            target: int64 [N], as :func:`hstree.ops.mark_targets` returns it: a class, -1 for a
                log-probability of 0 and no gradient, or V, on a GPU alone, for a row of NaN.
        """

    def target_loss(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`target_log_prob`, and the loss after the head's reduction."""
        output = self.target_log_prob(hidden, target)
        ignored = target == -1
        weight = self.target_weight(target, output.dtype)
        loss = -weight * output
        if self.label_smoothing:
            mean = self.mean_loss(hidden, target, output).masked_fill(ignored, 0.0)
            loss = torch.lerp(loss, mean, self.label_smoothing)
        loss = self.reduced(loss, weight)
        if self.z_loss:
            log_normalizer = self.target_score(hidden, target) - output
            square = log_normalizer.square().masked_fill(ignored, 0.0)
            loss = loss + self.z_loss * self.reduced(square, (~ignored).to(output.dtype))
        return output, loss

    def target_weight(self, target: Tensor, dtype: torch.dtype) -> Tensor:
        """Class weight [N] of each target, 0 for those that are ignored."""
        if self.class_weight is None:
            return (target != -1).to(dtype)
        weight = self.class_weight.to(dtype)[target.clamp(0, self.n_classes - 1)]
        return weight.masked_fill(target == -1, 0.0)

    def mean_loss(self, hidden: Tensor, target: Tensor, output: Tensor) -> Tensor:
        """Mean [N] of -c_v log p_v over all classes v: arguments and result of
        :meth:`target_log_prob`."""

        def mean(hidden: Tensor) -> Tensor:
            log_prob = self.class_log_prob(hidden)
            if self.class_weight is not None:
                log_prob = log_prob * self.class_weight.to(log_prob.dtype)
            return -log_prob.mean(1)

        return by_rows(mean, self.n_classes, hidden)

    def target_score(self, hidden: Tensor, target: Tensor) -> Tensor:
        """log p_y + log Z [N] of the targets: arguments of :meth:`target_log_prob`, whatever for
        ignored ones."""
        raise NotImplementedError(f"{type(self).__name__}: {self.no_z_loss}")

    def reduced(self, loss: Tensor, weight: Tensor) -> Tensor:
        """The losses [N] of rows after the head's reduction; a mean divides by the sum of
        ``weight`` [N]."""
        if self.reduction == "none":
            return loss
        total = loss.sum()
        return total / weight.sum() if self.reduction == "mean" else total

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, F], what :meth:`encode` returns."""

    def log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable."""
        return self.class_log_prob(self._encoded(hidden)).view(*hidden.shape[:-1], self.n_classes)

    def entropy(self, hidden: Tensor) -> Tensor:
        """Entropy [...] of each row's distribution, in nats: hidden [..., D]. Differentiable.

        Exact, from the log-probabilities of all classes, in chunks of rows.

        Example:
            >>> head = hstree.heads.Softmax(8, 4, bias=False)
            >>> head.entropy(torch.zeros(2, 8))
            tensor([1.3863, 1.3863], grad_fn=<ViewBackward0>)
        """
        return by_rows(self._row_entropy, self.n_classes, self._encoded(hidden)).view(
            hidden.shape[:-1]
        )

    def _row_entropy(self, hidden: Tensor) -> Tensor:
        log_prob = self.class_log_prob(hidden)
        finite = log_prob.clamp(min=torch.finfo(log_prob.dtype).min)  # 0 log 0 = 0
        return -(log_prob.exp() * finite).sum(1)

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

    def config(self) -> dict[str, Any]:
        """What :meth:`from_config` needs besides the tensors; JSON-able. ``label_smoothing`` and
        ``z_loss`` only where they are set."""
        config = {
            "in_features": self.in_features,
            "n_classes": self.n_classes,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "learning_rate_factor": self.learning_rate_factor,
        }
        return config | self._set_options()

    def _set_options(self) -> dict[str, float]:
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return {name: value for name, value in options.items() if value}

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
        weighted = "" if self.class_weight is None else ", class_weight=[V]"
        options = "".join(f", {name}={value}" for name, value in self._set_options().items())
        return (
            f"in_features={self.in_features}, n_classes={self.n_classes}, "
            f"reduction={self.reduction!r}{weighted}{options}"
        )

    def _encoded(self, hidden: Tensor) -> Tensor:
        if hidden.ndim < 1 or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape [..., {self.in_features}], got {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")
        if not torch.is_autocast_enabled(hidden.device.type):
            parameter = next(self.parameters(), None)  # none: trees over a single class
            hidden = hidden if parameter is None else hidden.to(parameter.dtype)
        hidden = self.encode(hidden)
        return hidden.reshape(-1, hidden.shape[-1])
