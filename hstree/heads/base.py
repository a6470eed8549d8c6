"""The interface that every output layer shares."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypedDict, overload

import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from hstree._checks import (
    check_choice,
    check_class_weight,
    check_classes,
    check_generator,
    check_ignore_index,
    check_int,
    check_nonnegative,
    check_number,
    check_probability,
    check_temperature,
    check_tensor,
    mark_targets,
    smoothed_frequencies,
)
from hstree._files import write_atomic
from hstree._numerics import (
    autocasts,
    draw_columns,
    is_transformed,
    log_sum_exp,
    without_ignored,
)
from hstree.heads.rows import (
    check_exclude,
    in_row_chunks,
    is_excluded,
    mask_candidates,
    mask_excluded,
    split_rows,
    tempered,
    topk_without,
    without,
)
from hstree.heads.state import HasWeight, Tables, TyingError, fill, tied_names

if TYPE_CHECKING:
    from typing_extensions import Self

REDUCTIONS = ("none", "sum", "mean")
METADATA_KEY = "hstree.head"

LARGEST_FACTOR, FACTOR_TIMES_NORM = 8.0, 90.0
"""Of the learning rate; benchmarks/results/learning_rates.md."""

ROUNDS = 8
"""So many times draws that are excluded are drawn again before all classes are scored."""


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


class LossOptions(TypedDict, total=False):
    """Keywords of :class:`Head` about the loss, which the constructors of all heads pass on."""

    ignore_index: int
    reduction: str
    class_weight: Any
    label_smoothing: float
    z_loss: float


class HeadOptions(LossOptions, total=False):
    """All keywords of :class:`Head`."""

    frequencies: npt.ArrayLike | None


class Head(nn.Module, ABC):
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
            self._check_alone()
        self._check_hidden(hidden)
        target = mark_targets(target, self.n_classes, self.ignore_index)
        if hidden.shape[:-1] != target.shape:
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
            )
        encoded = self._encoded(without_ignored(hidden, target == -1))
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

    # What a head answers about its distribution, besides the loss: from the log-probabilities of
    # all classes, unless a head overrides the methods of rows.

    def encode(self, hidden: Tensor) -> Tensor:
        """Input [..., F] of :meth:`target_loss` and the other row methods, computed from hidden
        [..., D]. By default ``hidden`` itself."""
        return hidden

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes: hidden [N, F], from :meth:`encode`."""

    def numbers_of_a_row(self, device: torch.device) -> int:
        """Numbers that :meth:`class_log_prob` holds for a row."""
        return self.n_classes

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """:meth:`class_log_prob` of the distribution that :meth:`sample` draws from."""
        return tempered(self.class_log_prob(hidden), temperature)

    def log_prob(self, hidden: Tensor, *, exclude: Tensor | None = None) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable.

        Args:
            hidden: context vectors, [..., D].
            exclude: classes to leave out, int64 or uint8: [K] for all rows, or [..., K] padded
                with -1. They have -inf, and the probabilities of the others sum to 1.

        Raises:
            ValueError: for a wrong shape or dtype of ``exclude``; on a CPU, where its values are
                read, for other values, or if no class is left.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.Softmax(8, 5), torch.randn(2, 8)
            >>> log_prob = head.log_prob(hidden, exclude=torch.tensor([[0, 3], [4, -1]]))
            >>> log_prob.isneginf().nonzero().tolist()
            [[0, 0], [0, 3], [1, 4]]
            >>> torch.allclose(log_prob.exp().sum(1), torch.ones(2))
            True
        """
        rows = self._queried(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        log_prob = self.class_log_prob(rows)
        if excluded is not None:
            log_prob = without(log_prob, excluded)
        return log_prob.view(*hidden.shape[:-1], self.n_classes)

    def entropy(self, hidden: Tensor) -> Tensor:
        """Entropy [...] of each row's distribution, in nats: hidden [..., D]. Differentiable.

        Exact: computed from the log-probabilities of all classes, in chunks of rows.

        Example:
            >>> import torch, hstree
            >>> head = hstree.Softmax(8, 4, bias=False)
            >>> head.entropy(torch.zeros(2, 8))
            tensor([1.3863, 1.3863], grad_fn=<ViewBackward0>)
        """
        return in_row_chunks(self._row_entropy, self.n_classes, self._queried(hidden)).view(
            hidden.shape[:-1]
        )

    def _row_entropy(self, hidden: Tensor) -> Tensor:
        log_prob = self.class_log_prob(hidden)
        finite = log_prob.clamp(min=-1e30)  # 0 log 0 = 0, also times the gradient
        return -(log_prob.exp() * finite).sum(1)

    def predict(self, hidden: Tensor, *, exclude: Tensor | None = None) -> Tensor:
        """Most probable class [...] of each row, int64: hidden [..., D], ``exclude`` as in
        :meth:`topk`."""
        with torch.no_grad():
            return self.topk(hidden, 1, exclude=exclude)[1].squeeze(-1)

    def topk(
        self, hidden: Tensor, k: int, *, exclude: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k most probable classes of each row, most probable first.

        Args:
            hidden: context vectors, [..., D].
            k: number of classes, at most V, or as many as ``exclude`` leaves.
            exclude: classes to leave out, as in :meth:`log_prob`: padding, or items that were seen.
                The values are those of the distribution over the other classes. Trees search for
                as many classes more, where a search pays.

        Returns:
            Log-probabilities [..., k], in nats and differentiable, and classes [..., k].

        Raises:
            ValueError: unless k is a whole number in [1, V]; for ``exclude`` as in
                :meth:`log_prob`, or if it leaves fewer than k classes. On a GPU, where its values
                are not read, the last classes are then excluded ones, of -inf.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> seen = torch.tensor([[3, 7, 8], [5, -1, -1]])
            >>> values, classes = head.topk(torch.randn(2, 8), 10, exclude=seen)
            >>> bool(torch.isin(seen[0], classes[0]).any())
            False
        """
        k = check_int("k", k, 1, self.n_classes)
        rows = self._queried(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, k)
        values, classes = self.topk_rows(rows, k, excluded)
        shape = (*hidden.shape[:-1], k)
        return values.view(shape), classes.view(shape)

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both results of :meth:`topk`, [N, k] each: hidden [N, F], from :meth:`encode`, excluded
        from ``check_exclude``. Computed in chunks of rows."""
        columns = self.numbers_of_a_row(hidden.device)
        parts: list[tuple[Tensor, Tensor]]
        if excluded is None:
            chunks = split_rows(columns, hidden)
            parts = [self.class_log_prob(rows).topk(k, dim=-1) for (rows,) in chunks]
        else:
            chunks = split_rows(columns, hidden, excluded.expand(hidden.shape[0], -1))
            parts = [topk_without(self.class_log_prob(rows), k, some) for rows, some in chunks]
        values, classes = zip(*parts, strict=True)
        return torch.cat(values), torch.cat(classes)

    def log_prob_without(
        self, hidden: Tensor, classes: Tensor, excluded: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Log-probabilities [N, n] of classes [N, n] that are not excluded, normalized over those:
        hidden [N, F], from :meth:`encode`, excluded from ``check_exclude``.

        Scores the classes and those excluded, and all classes of the rows whose excluded ones have
        more than half of the probability: 1 minus that would be rounded. Reads values.
        """
        excluded = excluded.expand(len(hidden), -1)
        some = self.candidate_rows(hidden, torch.cat([classes, excluded], 1), temperature)
        log_prob, of_excluded = some[:, : classes.shape[1]], some[:, classes.shape[1] :]
        log_excluded = log_sum_exp(of_excluded.masked_fill(excluded < 0, -math.inf), 1)
        most = log_excluded > -math.log(2)
        rest = torch.log1p(-log_excluded.masked_fill(most, -math.inf).exp())
        if bool(most.any()):
            every = self.tempered_log_prob(hidden[most], temperature)
            of_others = log_sum_exp(mask_excluded(every, excluded[most]), 1)
            rest = rest.masked_scatter(most, of_others.to(rest.dtype))
        return log_prob - rest[:, None]

    @overload
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: Literal[False] = False,
        exclude: Tensor | None = None,
    ) -> Tensor: ...

    @overload
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: Literal[True],
        exclude: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        n: int | None = None,
        *,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        return_log_prob: bool = False,
        exclude: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Classes drawn from each row's distribution, independently: hidden [..., D].

        Args:
            hidden: context vectors, [..., D].
            n: number of draws for each row; None: one, without a dimension of its own.
            temperature: at most 1e6 and at least 1e-6; below 1 sharper, above 1 flatter. Draws from
                p^(1 / temperature), normalized. Trees divide the scores of every node instead, and
                keep the gate: another distribution, whose draws score as few nodes. For
                p^(1 / temperature) of trees, draw from the softmax of ``log_prob(hidden) /
                temperature``.
            generator: random generator on the device of ``hidden``; None: the default one.
            return_log_prob: whether to return the log-probabilities of the classes as well, under
                the distribution that they are drawn from: exact, for trees under the whole mixture.
            exclude: classes that are not drawn, as in :meth:`log_prob`: draws and
                log-probabilities are those of the distribution over the other classes. Heads that
                draw without the scores of all classes draw again, which reads values on a GPU too.

        Returns:
            Classes [...], or [..., n] with ``n``, int64. With ``return_log_prob`` also their
            log-probabilities, of the same shape, in nats, without gradient; see
            :meth:`candidate_log_prob`.

        Raises:
            TypeError: if ``generator`` is not a generator.
            ValueError: for ``n`` or ``temperature`` out of range, a generator of another device, or
                ``exclude`` as in :meth:`log_prob`.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> classes, log_prob = head.sample(torch.randn(5, 8), 3, return_log_prob=True)
            >>> classes.shape, log_prob.shape
            (torch.Size([5, 3]), torch.Size([5, 3]))
        """
        draws = 1 if n is None else check_int("n", n)
        temperature = check_temperature(temperature)
        check_tensor("hidden", hidden)
        check_generator(generator, hidden.device)
        rows = self._queried(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        classes, log_prob = self.sample_rows(rows, draws, temperature, generator, excluded)
        shape = hidden.shape[:-1] if n is None else (*hidden.shape[:-1], draws)
        if not return_log_prob:
            return classes.view(shape)
        if log_prob is None:
            log_prob = (
                self.candidate_rows(rows, classes, temperature)
                if excluded is None
                else self.log_prob_without(rows, classes, excluded, temperature)
            )
        return classes.view(shape), log_prob.view(shape)

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Classes [N, n] and their log-probabilities [N, n], or None if those are
        :meth:`candidate_rows` or, with excluded from ``check_exclude``,
        :meth:`log_prob_without`: hidden [N, F], from :meth:`encode`."""
        if not len(hidden):
            shape = (0, n)
            return hidden.new_empty(shape, dtype=torch.int64), hidden.new_empty(shape)
        log_prob = self.tempered_log_prob(hidden, temperature)
        if excluded is not None:
            log_prob = without(log_prob, excluded)
        classes = draw_columns(log_prob.exp(), n, generator)
        return classes, log_prob.gather(1, classes)

    def sample_again(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """:meth:`sample_rows` of a head that draws without the scores of all classes: draws that
        are excluded are drawn again and, after ``ROUNDS``, from all classes."""
        if torch.compiler.is_compiling() or is_transformed() or hidden.is_meta:  # no values
            return Head.sample_rows(self, hidden, n, temperature, generator, excluded)
        classes, _ = self.sample_rows(hidden, n, temperature, generator)
        again = is_excluded(classes, excluded)
        for _ in range(ROUNDS):
            row, draw = again.nonzero(as_tuple=True)
            if not len(row):
                return classes, None
            some, _ = self.sample_rows(hidden[row], 1, temperature, generator)
            classes[row, draw] = some.squeeze(1)
            again = is_excluded(classes, excluded)
        (rows,) = again.any(1).nonzero(as_tuple=True)
        excluded = excluded.expand(len(hidden), -1)[rows]
        some, _ = Head.sample_rows(self, hidden[rows], n, temperature, generator, excluded)
        classes[rows] = torch.where(again[rows], some, classes[rows])
        return classes, None

    def candidate_log_prob(
        self,
        hidden: Tensor,
        candidates: Tensor,
        *,
        temperature: float = 1.0,
        ignore_index: int | None = None,
    ) -> Tensor:
        """Log-probabilities of K classes of each row. Differentiable.

        For distillation from the top k of a teacher, losses over several labels and scoring of
        candidates. Trees score the root once for each row. Without
        gradients on the CPU they look up candidates that share paths, so that every node is scored
        once; otherwise they score the groups of all candidates together, or all classes where that
        is less work. Other heads compute all classes, in chunks of rows.

        Args:
            hidden: context vectors, [..., D].
            candidates: classes, int64 or uint8 [..., K], in [0, V) or ``ignore_index``, which has
                log-probability 0 and no gradient. Other values as in :meth:`forward`.
            temperature: of the distribution that :meth:`sample` draws from.
            ignore_index: candidate to ignore; None: the ``ignore_index`` of the head. With -1 every
                class has its log-probability, also where the head ignores a class.

        Returns:
            Log-probabilities, [..., K], in nats.

        Raises:
            ValueError: for a wrong shape or dtype, ``temperature`` out of range, and on the CPU for
                a candidate out of range.

        Example:
            >>> import torch, hstree
            >>> head = hstree.TreeEnsemble.from_counts(8, range(2000, 0, -1))
            >>> head.candidate_log_prob(torch.randn(5, 8), torch.randint(2000, (5, 64))).shape
            torch.Size([5, 64])
        """
        check_tensor("hidden", hidden)
        candidates = check_classes("candidates", candidates)
        if candidates.shape[:-1] != hidden.shape[:-1] or not candidates.ndim:
            raise ValueError(
                f"candidates: expected shape {[*hidden.shape[:-1], 'K']} for hidden of shape "
                f"{list(hidden.shape)}, got {list(candidates.shape)}"
            )
        ignored = self.ignore_index if ignore_index is None else ignore_index
        marked = mark_targets(candidates, self.n_classes, ignored, name="candidates").reshape(
            hidden.shape[:-1].numel(), candidates.shape[-1]
        )
        temperature = check_temperature(temperature)
        nothing = (marked == -1).all(1).view(hidden.shape[:-1])
        rows = self._queried(without_ignored(hidden, nothing))
        log_prob = self.candidate_rows(rows, marked, temperature)
        return log_prob.view(candidates.shape)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """Log-probabilities [N, K]: hidden [N, F], from :meth:`encode`, and candidates [N, K] from
        :func:`hstree.ops.mark_targets`."""

        def chosen(hidden: Tensor, candidates: Tensor) -> Tensor:
            log_prob = self.tempered_log_prob(hidden, temperature)
            return log_prob.gather(1, candidates.clamp(0, self.n_classes - 1))

        log_prob = in_row_chunks(chosen, self.n_classes, hidden, candidates)
        return mask_candidates(log_prob, candidates, self.n_classes)

    def _queried(self, hidden: Tensor) -> Tensor:
        """:meth:`_encoded` of what the forward pre-hooks make of ``hidden``. They run in every
        query as in a call of the head: pruning and weight norm compute the weights in them."""
        if self._forward_pre_hooks:
            # With a graph: a loss whose backward pass computes again reads these weights.
            with torch.inference_mode(False), torch.enable_grad():
                hidden = self._hooked(hidden)
        self._check_hidden(hidden)
        return self._encoded(hidden)

    def _hooked(self, hidden: Tensor) -> Tensor:
        for key, hook in self._forward_pre_hooks.items():
            # FSDP undoes its own after forward, and register_fsdp_forward_method calls them.
            if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
                continue
            if key in self._forward_pre_hooks_with_kwargs:
                result = hook(self, (hidden,), {})
                result = result if result is None else result[0]
            else:
                result = hook(self, (hidden,))
            if result is not None:
                hidden = result[0] if isinstance(result, tuple) else result
        return hidden

    def _check_alone(self) -> None:
        """Raises ValueError for row-sparse gradients of several processes, which neither DDP nor
        FSDP averages."""
        if torch.is_grad_enabled() and dist.is_available() and dist.is_initialized():
            processes = dist.get_world_size()
            if processes > 1:
                raise ValueError(
                    f"sparse: expected False in training with {processes} processes, since "
                    "row-sparse gradients are not averaged over them, got True"
                )

    def _check_hidden(self, hidden: Tensor) -> None:
        check_tensor("hidden", hidden)
        if hidden.ndim < 1 or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"hidden: expected shape [..., {self.in_features}], got {tuple(hidden.shape)}"
            )
        if not hidden.is_floating_point():
            raise ValueError(f"hidden: expected a floating-point dtype, got {hidden.dtype}")

    def _encoded(self, hidden: Tensor) -> Tensor:
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
        lr = check_number("lr", lr, positive=True)
        if factor is None:
            lr *= min(LARGEST_FACTOR, FACTOR_TIMES_NORM / self._mean_norm(hidden))
        else:
            lr *= check_number("factor", factor, positive=True)
        weight_decay = check_nonnegative("weight_decay", weight_decay)
        apart = {id(parameter) for parameter in self._apart()}
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad and id(parameter) not in apart:
                is_weight = parameter.dim() > 1 and not name.endswith("bias")
                decay = weight_decay if is_weight else 0.0
                groups.setdefault(decay, []).append(parameter)
        own = [{"params": p, "lr": lr, "weight_decay": decay} for decay, p in groups.items()]
        return own + self._groups_apart(lr)

    def _mean_norm(self, hidden: Tensor | None) -> float:
        if hidden is None:
            return math.sqrt(self.in_features)
        self._check_hidden(hidden)
        norm = hidden.detach().float().norm(dim=-1).mean().item()
        return check_number("hidden: mean norm", norm, positive=True)

    def _groups_apart(self, lr: float) -> list[dict[str, Any]]:
        """Groups of parameters that are not in the head's own; ``lr``: its learning rate."""
        return []

    def _apart(self) -> Iterable[Tensor]:
        """Parameters that are not in the head's own groups."""
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
        :meth:`hstree.heads.FlatHead.resized`.

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
            tensors: state dict of the saved head; the head may keep them.
            embedding: embedding to which a tied head is tied; None: the head gets its own weight.
        """

    def save(self, path: str | os.PathLike[str], *, embedding: HasWeight | None = None) -> None:
        """Write the head to one safetensors file, with its configuration in the metadata.

        The file is replaced atomically. :func:`hstree.heads.load_head` reads it. With
        ``embedding``, the module to whose weight the head is tied, the file does not hold that
        weight, and ``load_head`` needs the module too. Raises ValueError if the head is not tied to
        it.
        """
        left_out = [] if embedding is None else tied_names(self, embedding)
        if embedding is not None and not left_out:
            raise TyingError(
                "embedding: expected the module to whose weight the head is tied, got a "
                f"{type(embedding).__name__} with another weight"
            )
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
