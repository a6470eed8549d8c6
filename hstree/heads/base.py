"""The interface that every output layer shares."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import (
    check_choice,
    check_class_weight,
    check_ignore_index,
    check_int,
    check_nonnegative,
    check_probability,
    check_tensor,
    mark_targets,
    smoothed_frequencies,
)
from hstree._numerics import autocasts, without_ignored
from hstree.heads.queries import Queries
from hstree.heads.rows import in_row_chunks
from hstree.heads.state import HasWeight, Tables, adopt_tables, fill, save_head
from hstree.optim.groups import check_one_process, groups_of_head

if TYPE_CHECKING:
    from typing_extensions import Self

REDUCTIONS = ("none", "sum", "mean")


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


class Head(Queries):
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
        ignore_index: targets of this value contribute neither loss nor gradient, whatever their
            hidden vectors hold, NaN too.
        reduction: ``"mean"`` over the rows that are not ignored (NaN if there are none, as in
            :func:`torch.nn.functional.cross_entropy`), ``"sum"`` or ``"none"``. With class weights
            the mean is weighted: it divides by the sum of the targets' weights.
        class_weight: class weights, c [V], at least 0; None: all 1. A buffer, saved with the head.
        label_smoothing: label smoothing, epsilon in [0, 1). Heads whose scores are W e + b
            (softmax, moc) compute the mean over the classes without logits. Other heads, trees
            included, compute the log-probabilities of all classes in chunks of rows: O(N V) time.
        z_loss: coefficient of (log Z)^2, where Z is the normalizer of the row's softmax (Chowdhery
            et al., PaLM, 2022). It is added to each row that is not ignored, without class weight.
            Only for heads with one normalizer: not for mixtures of softmaxes, trees or the
            adaptive softmax.
        frequencies: class counts [V], such as those of a training text. Biases start so that the
            untrained head gives their distribution, as far as it does not depend on ``hidden``, and
            an order of the classes is that of their frequencies. Not saved. None: all equal.

    Raises:
        TypeError: for an option of an unknown name.
        ValueError: for a size below 1, an unknown reduction, an option out of range, or an option
            that the head does not have.

    Example:
        >>> import torch, hstree
        >>> head: hstree.Head = hstree.TreeEnsemble.from_counts(16, [8, 4, 2, 1])
        >>> output, loss = head(torch.randn(2, 3, 16), torch.randint(4, (2, 3)))
        >>> output.shape, loss.shape
        (torch.Size([2, 3]), torch.Size([]))
        >>> head.log_prob(torch.randn(2, 3, 16)).shape, head.predict(torch.randn(5, 16)).shape
        (torch.Size([2, 3, 4]), torch.Size([5]))
    """

    name: str
    """Name in the registry, that of the class or the one under which the head was built."""

    may_skip_parameters: ClassVar[bool] = False
    """Whether a batch may leave some parameters without a gradient."""

    sparse: bool = False
    """Whether parameters have row-sparse gradients in training."""

    samples_in_training: bool = False
    """Whether, in training mode, ``output`` and the loss are estimates from sampled classes."""

    trainable: ClassVar[bool] = True
    """Whether :func:`hstree.heads.build_head` makes the head, to be trained. Others are made from a
    trained one."""

    has_normalizer: ClassVar[bool] = False
    """Whether one number Z of a row normalizes all classes, as :meth:`target_score` and with it the
    z-loss need."""

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__()
        self._constants: dict[str, Tensor] = {}
        self.in_features = check_int("in_features", in_features)
        self.n_classes = check_int("n_classes", n_classes)
        self.ignore_index = check_ignore_index(ignore_index)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.register_constant("class_weight", check_class_weight(class_weight, self.n_classes))
        self.label_smoothing = check_probability("label_smoothing", label_smoothing)
        self.z_loss = check_nonnegative("z_loss", z_loss)
        if self.z_loss and not self.has_normalizer:
            raise ValueError(
                f"z_loss: expected 0 for {type(self).__name__}, which has no normalizer of all "
                f"classes, got {z_loss}; heads with one take it, such as 'softmax'"
            )
        self.frequencies = None
        if frequencies is not None:
            self.frequencies = smoothed_frequencies(frequencies, self.n_classes)

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
        if self.sparse:
            check_one_process()
        self.check_hidden(hidden)
        target = mark_targets(target, self.n_classes, self.ignore_index)
        if hidden.shape[:-1] != target.shape:
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
            )
        encoded = self.encoded_rows(without_ignored(hidden, target == -1))
        output, loss = self.target_loss(encoded, target.reshape(-1))
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
        weight = self.target_weight(target, output.dtype)
        loss = -weight * output
        if self.label_smoothing:
            mean = self.mean_loss(hidden, target, output).masked_fill(target == -1, 0.0)
            loss = torch.lerp(loss, mean, self.label_smoothing)
        loss = self.reduced(loss, weight)
        if self.z_loss:
            log_normalizer = self.target_score(hidden, target) - output
            kept = target != -1
            square = log_normalizer.square().masked_fill(~kept, 0.0)
            loss = loss + self.z_loss * self.reduced(square, kept.to(output.dtype))
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
        if self.reduction == "sum":
            return total
        of_all = weight.sum()
        nothing = of_all == 0
        return (total / of_all.masked_fill(nothing, 1.0)).masked_fill(nothing, torch.nan)

    def encode(self, hidden: Tensor) -> Tensor:
        """Input [..., F] of :meth:`target_loss` and the other row methods, computed from hidden
        [..., D]. By default ``hidden`` itself."""
        return hidden

    def check_hidden(self, hidden: Tensor) -> None:
        check_tensor("hidden", hidden)
        if hidden.ndim < 1 or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape [..., {self.in_features}], got {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")

    def encoded_rows(self, hidden: Tensor) -> Tensor:
        if isinstance(self, Tables):
            self.place_tables(hidden.device)
        if not autocasts(hidden.device):
            parameter = next(self.parameters(), None)  # none: trees over a single class
            hidden = hidden if parameter is None else hidden.to(parameter.dtype)
        hidden = self.encode(hidden)
        return hidden.reshape(-1, hidden.shape[-1])

    # Its parameters, and its life

    def parameter_groups(
        self,
        lr: float,
        weight_decay: float = 0.01,
        *,
        factor: float | None = None,
        hidden: Tensor | None = None,
    ) -> list[dict[str, Any]]:
        r"""Parameter groups for the optimizers of torch and :class:`hstree.optim.AdamW`.

        Biases and all other one-dimensional parameters have no weight decay. Frozen parameters are
        omitted, and so is a tied embedding, which belongs to the model.

        Args:
            lr: learning rate of the model. That of the head is ``factor`` times this, except for
                the slopes of a PLIF: its ``slope_learning_rate``.
            weight_decay: weight decay of the weights; 0 for SGD and Adagrad with row-sparse
                gradients.
            factor: positive; None: :math:`\min(8, 90 / \lVert h \rVert)`, since a step of Adam
                moves a score in proportion to the features.
            hidden: hidden vectors of a batch [..., D], whose mean norm is measured; None: a root
                mean square of 1 is assumed, :math:`\lVert h \rVert = \sqrt{D}`. Not read with a
                ``factor``.

        Returns:
            Dicts of ``params``, ``lr`` and ``weight_decay``.

        Raises:
            ValueError: if ``lr`` or ``factor`` is not positive and finite, ``weight_decay`` is
                negative, or ``hidden`` has another number of features or is zero or not finite.

        Example:
            >>> import torch, hstree
            >>> backbone, head = torch.nn.Linear(8, 16), hstree.Softmax(16, 100)
            >>> groups = [{"params": backbone.parameters()}, *head.parameter_groups(lr=1e-3)]
            >>> optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
            >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
            [(0.001, 0.01), (0.008, 0.01), (0.008, 0.0)]
        """
        return groups_of_head(self, lr, weight_decay, factor, hidden)

    def tied_parameters(self) -> Iterable[Tensor]:
        """Parameters that belong to another module, such as the weight of an embedding."""
        return ()

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Parameters with row-sparse gradients (``torch.sparse_coo``) in training."""
        return []

    def register_constant(self, name: str, value: Tensor | None) -> None:
        """Register a buffer whose value comes from an argument of the constructor. It is saved with
        the head, and :meth:`reset_parameters` restores it."""
        if value is not None:
            self._constants[name] = value.detach().cpu().clone()
            value = value.to(torch.get_default_device())
        self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Reset the whole state to what the constructor sets; random values are drawn again.

        Call it after ``to_empty`` on a head that was made on the meta device. Sharded parameters
        (DTensor) are reset too. A tied embedding is not changed. A loaded head is reset without
        the class frequencies it was built with, because they are not saved.

        Example:
            >>> import torch, hstree
            >>> with torch.device("meta"):
            ...     head = hstree.Softmax(400, 10000)
            >>> _ = head.to_empty(device="cpu")  # or "cuda"
            >>> head.reset_parameters()
            >>> head.bias.abs().max()
            tensor(0., grad_fn=<MaxBackward1>)
        """
        for name, value in self._constants.items():
            fill(self.get_buffer(name), value)

    def resized(
        self,
        num_classes: int,
        *,
        frequencies: npt.ArrayLike | None = None,
        embedding: HasWeight | None = None,
    ) -> Self:
        """A new head with more or fewer classes, of heads that have a row for each class: see
        :meth:`hstree.heads.Softmax.resized`.

        Raises:
            NotImplementedError: for any other head.
        """
        raise NotImplementedError(
            f"resized: {type(self).__name__} has no form for another number of classes; build a "
            "new head over the new classes and copy the parameters that stay, or use a head that "
            "has a row for each class, such as hstree.Softmax or hstree.ForestSoftmax"
        )

    def config(self) -> dict[str, Any]:
        """Arguments of :meth:`from_config`, serializable as JSON; ``label_smoothing`` and
        ``z_loss`` only if they are not 0."""
        config = {
            "in_features": self.in_features,
            "n_classes": self.n_classes,
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
        }
        return config | self._set_options()

    def _set_options(self) -> dict[str, float]:
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        return {name: value for name, value in options.items() if value}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: HasWeight | None = None,
    ) -> Self:
        """A head into which ``load_state_dict(tensors)`` loads the state. By default its tables,
        and what the constructor makes of the configuration.

        Args:
            config: result of :meth:`config`.
            tensors: state dict of the saved head; the head may keep them.
            embedding: embedding to which a tied head is tied; None: the head gets its own weight.
        """
        options = dict(config)
        if "tied" in options:
            options["embedding"] = embedding if options.pop("tied") else None
        head = cls(**options, class_weight=tensors.get("class_weight"))
        adopt_tables(head, tensors)
        return head

    def save(self, path: str | os.PathLike[str], *, embedding: HasWeight | None = None) -> None:
        """Write the head to one safetensors file, with its configuration in the metadata.

        The file is replaced atomically. :func:`hstree.heads.load_head` reads it. With
        ``embedding``, the module to whose weight the head is tied, the file does not hold that
        weight, and ``load_head`` needs the module too. Raises ValueError if the head is not tied to
        it.
        """
        save_head(self, path, embedding)

    def extra_repr(self) -> str:
        weighted = "" if self.class_weight is None else ", class_weight=[V]"
        options = "".join(f", {name}={value}" for name, value in self._set_options().items())
        return (
            f"in_features={self.in_features}, n_classes={self.n_classes}, "
            f"reduction={self.reduction!r}{weighted}{options}"
        )
