"""The interface that every output layer shares."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hstree._checks import (
    check_choice,
    check_classes,
    check_ignore_index,
    check_int,
    check_nonnegative,
    check_number,
    check_probability,
    check_tensor,
)
from hstree._files import write_atomic
from hstree.heads.buffers import Resettable
from hstree.heads.inference import QUERIES, Inference
from hstree.heads.losses import check_class_weight, in_row_chunks, mean_of
from hstree.heads.parameters import HeadParameters
from hstree.heads.resizing import ClassChange, check_change, resized
from hstree.heads.sharding import register_forward_methods
from hstree.heads.signatures import name_options
from hstree.heads.spelling import unknown_option
from hstree.heads.tying import HasWeight, tied_names
from hstree.ops import mark_targets

if TYPE_CHECKING:
    from typing_extensions import Self

    from hstree.lm.data.statistics import CorpusStatistics

REDUCTIONS = ("none", "sum", "mean")
METADATA_KEY = "hstree.head"


class HeadOutput(NamedTuple):
    """Result of a head, with the fields of :class:`torch.nn.AdaptiveLogSoftmaxWithLoss`.

    Attributes:
        output: log-probability of each row's target, in nats, shape of ``target``; 0 for ignored
            rows. Options of the loss do not change it: compute perplexities from it. An estimate
            in the training mode of a head that samples classes, :class:`SampledSoftmax`.
        loss: the training loss after the head's ``reduction``: the negative log-likelihood, with
            class weights, label smoothing and z-loss where the head has them.

    Example:
        >>> import torch, hstree
        >>> head = hstree.Softmax(8, 100, reduction="sum")
        >>> output, loss = head(torch.randn(5, 8), torch.arange(5))
        >>> torch.allclose(loss, -output.sum())
        True
    """

    output: Tensor
    loss: Tensor


class Head(Inference, HeadParameters, Resettable, ABC):
    r"""An output layer: a distribution over V classes for every context vector.

    ``forward(hidden, target)`` returns ``(output, loss)``. ``head(hidden, target).loss`` replaces
    ``F.cross_entropy(linear(hidden), target)``. The class weights :math:`c` (``weight`` there) and
    the label smoothing :math:`\epsilon` enter as in :func:`torch.nn.functional.cross_entropy`:

    .. math::
        \ell_n = -(1 - \epsilon)\, c_{y_n} \log p_{n y_n}
        - \frac{\epsilon}{V} \sum_v c_v \log p_{nv}

    Forward pre-hooks, such as those of pruning and weight norm, run in every query (``log_prob``,
    ``topk``, ``sample``, ...) as in ``forward``, with ``hidden`` as the only input.

    ``hidden`` may have any leading dimensions and any floating-point dtype. It is cast to the dtype
    of the weights; under autocast, autocast decides. Losses and log-probabilities are float32, or
    float64 for weights in float64.

    Args:
        in_features: number of input features, D: the size of a context vector.
        n_classes: number of classes, V.
        ignore_index: targets of this value contribute neither loss nor gradient.
        reduction: ``"mean"`` over the rows that are not ignored (NaN if there are none, as in
            :func:`torch.nn.functional.cross_entropy`), ``"sum"`` or ``"none"``. With class weights
            the mean is weighted: it divides by the sum of the targets' weights.
        learning_rate_factor: factor on the model's learning rate for the head's own parameters.
        class_weight: class weights, c [V], at least 0; None: all 1. A buffer, saved with the head.
        label_smoothing: label smoothing, epsilon in [0, 1). Heads whose scores are W e + b
            (softmax, moc) compute the mean over the classes without logits. Other heads, trees
            included, compute the log-probabilities of all classes in chunks of rows: O(N V) time.
        z_loss: coefficient of (log Z)^2, where Z is the normalizer of the row's softmax (Chowdhery
            et al., PaLM, 2022). It is added to each row that is not ignored, without class weight.
            Only for heads with one normalizer: not for mixtures of softmaxes, trees or the
            adaptive softmax.

    Raises:
        TypeError: for an option of an unknown name; the error names the one that was meant.
        ValueError: for a size below 1, an unknown reduction, an option out of range, or an option
            that the head does not have.

    Example:
        >>> import torch, hstree
        >>> head: hstree.Head = hstree.TreeEnsemble.from_counts(16, [8, 4, 2, 1], gate="context")
        >>> output, loss = head(torch.randn(2, 3, 16), torch.randint(4, (2, 3)))
        >>> output.shape, loss.shape
        (torch.Size([2, 3]), torch.Size([]))
        >>> head.log_prob(torch.randn(2, 3, 16)).shape, head.predict(torch.randn(5, 16)).shape
        (torch.Size([2, 3, 4]), torch.Size([5]))
    """

    name: ClassVar[str]
    reads_layers: ClassVar[bool] = False
    """Whether ``hidden`` is the concatenation of the word embedding and every layer's output;
    :meth:`from_corpus` then takes their sizes as ``layer_sizes``."""

    may_skip_parameters: ClassVar[bool] = False
    """Whether a batch may leave some parameters without a gradient."""

    samples_in_training: ClassVar[bool] = False
    """Whether, in training mode, ``output`` and the loss are estimates from sampled classes."""

    has_normalizer: ClassVar[bool] = False
    """Whether one number Z of a row normalizes all classes, as :meth:`target_score` and with it the
    z-loss need."""

    class_weight: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name_options(cls)
        register_forward_methods(cls, QUERIES)

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
        **unknown: Any,
    ) -> None:
        if unknown:
            raise unknown_option(type(self), next(iter(unknown)))
        super().__init__()
        self.in_features = check_int("in_features", in_features)
        self.n_classes = check_int("n_classes", n_classes)
        self.ignore_index = check_ignore_index(ignore_index)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.learning_rate_factor = check_number(
            "learning_rate_factor", learning_rate_factor, positive=True
        )
        self.register_constant("class_weight", check_class_weight(class_weight, self.n_classes))
        self.label_smoothing = check_probability("label_smoothing", label_smoothing)
        self.z_loss = check_nonnegative("z_loss", z_loss)
        if self.z_loss and not self.has_normalizer:
            raise ValueError(
                f"z_loss: expected 0 for the head {self.name!r}, which has no normalizer of all "
                f"classes, got {z_loss}; heads with one take it, such as 'softmax'"
            )

    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, target: Tensor) -> HeadOutput: ...

    def forward(self, hidden: Tensor, target: Tensor) -> HeadOutput:
        """Log-probability of the targets, and the loss.

        Args:
            hidden: context vectors, [..., D], floating point.
            target: classes, [...], int64 or uint8, in [0, V) or ``ignore_index``. Any other value
                raises ValueError on the CPU, and RuntimeError under torch.func or torch.compile. On
                a GPU values are not read, which would cost a synchronization: the row becomes NaN,
                and :class:`hstree.heads.AdaptiveSoftmax` fails a device-side assertion of torch.
        """
        check_tensor("hidden", hidden)
        target = check_classes("target", target)
        if hidden.shape[:-1] != target.shape:
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
            )
        flat = mark_targets(target.reshape(-1), self.n_classes, self.ignore_index)
        output, loss = self.target_loss(self._encoded(hidden), flat)
        loss = loss.view(target.shape) if self.reduction == "none" else loss
        return HeadOutput(output.view(target.shape), loss)

    @abstractmethod
    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N] of the targets.

        Args:
            hidden: result of :meth:`encode`, [N, F].
            target: int64 [N], from :func:`hstree.ops.mark_targets`: a class; -1 for a
                log-probability of 0 without gradient; or, on a GPU only, V for a row of NaN.
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
        """Class weight [N] of each target, 0 for ignored ones."""
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
                weight = self.class_weight.to(log_prob.dtype)
                log_prob = log_prob.masked_fill(weight == 0, 0.0) * weight  # not 0 times inf
            return -log_prob.mean(1)

        return in_row_chunks(mean, self.n_classes, hidden)

    def target_score(self, hidden: Tensor, target: Tensor) -> Tensor:
        """log p_y + log Z [N] of the targets, undefined for ignored ones: arguments of
        :meth:`target_log_prob`."""
        raise NotImplementedError(f"{type(self).__name__} has no normalizer of all classes")

    def reduced(self, loss: Tensor, weight: Tensor) -> Tensor:
        """The losses [N] of rows after the head's reduction; a mean divides by the sum of
        ``weight`` [N], and is NaN without gradient if that is 0."""
        if self.reduction == "none":
            return loss
        total = loss.sum()
        return mean_of(total, weight.sum()) if self.reduction == "mean" else total

    def config(self) -> dict[str, Any]:
        """Arguments of :meth:`from_config`, serializable as JSON; ``label_smoothing`` and
        ``z_loss`` only if they are not 0."""
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
        embedding: HasWeight | None = None,
    ) -> Self:
        """A head into which ``load_state_dict(tensors)`` loads the state.

        Args:
            config: result of :meth:`config`.
            tensors: state dict of the saved head.
            embedding: embedding to which a tied head is tied; None: the head gets its own weight.
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
            in_features: number of input features, D.
            n_classes: number of classes, V.
            statistics: class frequencies and word vectors of the corpus.
            embedding: the model's input embedding, for heads that are tied to it.
            seed: seed of everything random other than the parameters, such as trees.
            **options: further arguments of the head.
        """

    def resized(
        self,
        num_classes: int,
        *,
        frequencies: npt.ArrayLike | None = None,
        embedding: HasWeight | None = None,
    ) -> Self:
        """A new head with more or fewer classes, which starts from what this one has learned.

        It has the kind, options, dtype, device and mode of this head, and trains the same
        parameters. Classes 0 to min(V, num_classes) - 1 keep their rows and biases. Optimizers
        need the parameters of the new head. No random numbers are drawn.

        New classes get the mean row of the old ones, and the mean of their biases. So does
        ``class_weight``. What becomes of the probabilities p of the other classes:

        - One softmax over W e + b or a function of it, and :class:`Mixtape`: they stay p up to
          renormalization, which is exact, for new classes and for removed ones. With scores that
          are linear in W, each new class gets at most 1 / V of what all old ones together have.
        - Mixtures of softmaxes: the same in each component.
        - :class:`AdaptiveSoftmax`: new classes come last in ``order``, in the last cluster. A
          cluster keeps its probability, and its classes are renormalized. Clusters without classes
          end, from the last one on.
        - :class:`TreeEnsemble`: the old trees stay. New classes become children of the root, as
          clusters of the size of the present ones; or, if the root is binary, a subtree beside the
          old tree. Each tree is renormalized, which is exact for the mixture too if T = 1 or the
          root is binary. Nodes lose the children whose classes are removed, and their other
          children are renormalized; a node with one child left is replaced by it. Two things are
          not kept exactly then. If the roots of the trees would become of different widths, the
          smallest clusters of the narrower ones are divided, by constant shares. If a node whose
          leaves are shared has only classes left, they are told apart by their rows of E.

        Args:
            num_classes: number of classes of the new head.
            frequencies: class counts [num_classes], of old and new classes: where vectors are zero,
                new classes start with their share; None: with the geometric mean of the old ones.
                Later they are the frequencies of the new head, for :meth:`reset_parameters` and for
                negatives. Heads without biases do not read them.
            embedding: for a tied head, the module whose weight [num_classes, D] the new head is
                tied to. None: it is not tied, and gets a copy of the rows.

        Raises:
            ValueError: for an argument out of range; for parameters on the meta device, sharded, or
                computed from others; if ``ignore_index`` would become a class; for an adaptive
                softmax with ``frequencies``, or whose clusters would become empty.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.Softmax(8, 100), torch.randn(5, 8)
            >>> more = head.resized(103)
            >>> more.n_classes, bool((more.weight[:100] == head.weight).all())
            (103, True)
            >>> of_old = more.log_prob(hidden)[:, :100].log_softmax(-1)
            >>> torch.allclose(of_old, head.log_prob(hidden), atol=1e-5)
            True
        """
        return resized(self, check_change(self, num_classes, frequencies, embedding))

    def resize_classes(self, change: ClassChange) -> None:
        """Give this head, a copy that :meth:`resized` made, parameters and tables for the other
        classes. Its tensors are those of the original: they are replaced, not changed."""
        raise NotImplementedError(
            f"resized: {type(self).__name__} does not say what its classes are; implement "
            "resize_classes"
        )

    def save(self, path: str | os.PathLike[str], *, embedding: HasWeight | None = None) -> None:
        """Write the head to one safetensors file, with its configuration in the metadata.

        The file is replaced atomically. :func:`hstree.heads.load_head` reads it. With
        ``embedding``, the module to whose weight the head is tied, the file does not hold that
        weight, and ``load_head`` needs the module too. Raises ValueError if the head is not tied to
        it.
        """
        left_out = [] if embedding is None else tied_names(self, embedding)
        tensors = {
            name: value.detach().contiguous().cpu()
            for name, value in self.state_dict().items()
            if name not in left_out
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
