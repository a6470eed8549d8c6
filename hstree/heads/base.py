"""The interface that every output layer shares."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, overload

import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import (
    check_choice,
    check_class_weight,
    check_classes,
    check_generator,
    check_hidden,
    check_ignore_index,
    check_int,
    check_nonnegative,
    check_probability,
    check_temperature,
    check_tensor,
    mark_targets,
    smoothed_frequencies,
)
from hstree._numerics import autocasts, without_ignored
from hstree.heads.rows import (
    check_exclude,
    gather_marked,
    hooked,
    in_row_chunks,
    log_prob_without,
    sample_of_all,
    tempered,
    topk_of_all,
    without,
)
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

    # The loss

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
        check_hidden(hidden, self.in_features)
        marked = mark_targets(target, self.n_classes, self.ignore_index)
        if hidden.shape[:-1] != target.shape:
            several = target.ndim == hidden.ndim and target.shape[:-1] == hidden.shape[:-1]
            raise ValueError(
                f"target: expected shape {tuple(hidden.shape[:-1])} for hidden of shape "
                f"{tuple(hidden.shape)}, got {tuple(target.shape)}"
                + "; repeat the hidden vectors of a row for each of its labels"
                * several
            )
        if marked is not target:  # a row may be ignored
            hidden = without_ignored(hidden, marked == -1)
        output, loss = self.target_loss(self.encoded_rows(hidden), marked.reshape(-1))
        loss = loss.view(target.shape) if self.reduction == "none" else loss
        return HeadOutput(output.view(target.shape), loss)

    @abstractmethod
    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probability [N] of the targets: hidden [N, F], from :meth:`encode`, and target int64
        [N], from :func:`hstree.ops.mark_targets`: a class; -1 for a log-probability of 0 without
        gradient; or, on a GPU only, V for a row of NaN."""

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

    def encoded_rows(self, hidden: Tensor) -> Tensor:
        """Rows [N, F], encoded, of hidden [..., D]."""
        if isinstance(self, Tables):
            self.place_tables(hidden.device)
        if not autocasts(hidden.device):
            parameter = next(self.parameters(), None)  # none: trees over a single class
            hidden = hidden if parameter is None else hidden.to(parameter.dtype)
        hidden = self.encode(hidden)
        return hidden.reshape(-1, hidden.shape[-1])

    def _query_rows(self, hidden: Tensor) -> Tensor:
        """:meth:`encoded_rows` of what the forward pre-hooks make of ``hidden``. They run in every
        query as in a call of the head: pruning and weight norm compute the weights in them."""
        if self._forward_pre_hooks:
            # With a graph: a loss whose backward pass computes again reads these weights.
            with torch.inference_mode(False), torch.enable_grad():
                hidden = hooked(self, hidden)
        check_hidden(hidden, self.in_features)
        return self.encoded_rows(hidden)

    # The distribution

    def log_prob(self, hidden: Tensor, *, exclude: Tensor | None = None) -> Tensor:
        """Log-probabilities [..., V] of all classes, in nats: hidden [..., D]. Differentiable.

        Args:
            hidden: context vectors, [..., D].
            exclude: classes to leave out, int64: [K] for all rows, or [..., K] padded with -1. They
                have -inf, and the probabilities of the others sum to 1.

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
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        log_prob = self.class_log_prob(rows)
        if excluded is not None:
            log_prob = without(log_prob, excluded)
        return log_prob.view(*hidden.shape[:-1], self.n_classes)

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits [..., V]: scores of all classes whose softmax is the distribution, such as W h + b
        of :class:`Softmax`, scaled and capped. Float32, or float64 for weights in float64;
        differentiable. Hidden [..., D].

        Raises:
            NotImplementedError: for heads with more than one softmax: mixtures of softmaxes,
                forests, trees and the adaptive softmax.

        Example:
            >>> import torch, hstree
            >>> head, hidden = hstree.GSS(8, 5), torch.randn(2, 8)
            >>> scores = head.scores(hidden)
            >>> torch.allclose(scores.log_softmax(-1), head.log_prob(hidden), atol=1e-5)
            True
        """
        scores = self.class_scores(self._query_rows(hidden))
        return scores.view(*hidden.shape[:-1], self.n_classes)

    def entropy(self, hidden: Tensor) -> Tensor:
        """Entropy [...] of each row's distribution, in nats: hidden [..., D]. Differentiable.

        Exact: computed from the log-probabilities of all classes, in chunks of rows.

        Example:
            >>> import torch, hstree
            >>> head = hstree.Softmax(8, 4, bias=False)
            >>> head.entropy(torch.zeros(2, 8))
            tensor([1.3863, 1.3863], grad_fn=<ViewBackward0>)
        """

        def of_rows(hidden: Tensor) -> Tensor:
            log_prob = self.class_log_prob(hidden)
            finite = log_prob.clamp(min=-1e30)  # 0 log 0 = 0, also times the gradient
            return -(log_prob.exp() * finite).sum(1)

        rows = self._query_rows(hidden)
        return in_row_chunks(of_rows, self.n_classes, rows).view(hidden.shape[:-1])

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
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, k)
        values, classes = self.topk_rows(rows, k, excluded)
        shape = (*hidden.shape[:-1], k)
        return values.view(shape), classes.view(shape)

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
            exclude: classes that are not drawn, as in :meth:`log_prob`. Heads that draw without
                the scores of all classes draw again, which reads values on a GPU too.

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
        rows = self._query_rows(hidden)
        excluded = check_exclude(exclude, hidden.shape[:-1], self.n_classes, 1)
        classes, log_prob = self.sample_rows(rows, draws, temperature, generator, excluded)
        shape = hidden.shape[:-1] if n is None else (*hidden.shape[:-1], draws)
        if not return_log_prob:
            return classes.view(shape)
        if log_prob is None:
            log_prob = (
                self.candidate_rows(rows, classes, temperature)
                if excluded is None
                else log_prob_without(self, rows, classes, excluded, temperature)
            )
        return classes.view(shape), log_prob.view(shape)

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
        candidates. Trees score the root once for each row, and below it what the candidates need,
        or all classes where that is less work. Other heads compute all classes, in chunks of rows.

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
            shape = ", ".join([*map(str, hidden.shape[:-1]), "K"])
            raise ValueError(
                f"candidates: expected shape [{shape}] for hidden of shape {list(hidden.shape)}, "
                f"got {list(candidates.shape)}"
            )
        ignored = self.ignore_index if ignore_index is None else ignore_index
        marked = mark_targets(candidates, self.n_classes, ignored, name="candidates").reshape(
            hidden.shape[:-1].numel(), candidates.shape[-1]
        )
        temperature = check_temperature(temperature)
        nothing = (marked == -1).all(1).view(hidden.shape[:-1])
        rows = self._query_rows(without_ignored(hidden, nothing))
        log_prob = self.candidate_rows(rows, marked, temperature)
        return log_prob.view(candidates.shape)

    # The same of rows, which a head may compute in other ways: hidden [N, F], from ``encode``

    @abstractmethod
    def class_log_prob(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [N, V] of all classes."""

    def tempered_log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """:meth:`class_log_prob` of the distribution that :meth:`sample` draws from."""
        return tempered(self.class_log_prob(hidden), temperature)

    def class_scores(self, hidden: Tensor) -> Tensor:
        """Scores [N, V], float32 or float64."""
        raise NotImplementedError(
            f"scores: {type(self).__name__} has no scores of all classes whose softmax is its "
            "distribution; log_prob gives log-probabilities, whose softmax it is, too"
        )

    def topk_rows(
        self, hidden: Tensor, k: int, excluded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both results of :meth:`topk`, [N, k] each; excluded from ``check_exclude``."""
        return topk_of_all(self, self.n_classes, hidden, k, excluded)

    def sample_rows(
        self,
        hidden: Tensor,
        n: int,
        temperature: float,
        generator: torch.Generator | None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Classes [N, n] and their log-probabilities [N, n], or None if those are
        :meth:`candidate_rows` or, with excluded from ``check_exclude``, ``log_prob_without``."""
        return sample_of_all(self, hidden, n, temperature, generator, excluded)

    def candidate_rows(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """Log-probabilities [N, K] of candidates [N, K] from :func:`hstree.ops.mark_targets`."""

        def gathered(hidden: Tensor, candidates: Tensor) -> Tensor:
            return gather_marked(self.tempered_log_prob(hidden, temperature), candidates)

        return in_row_chunks(gathered, self.n_classes, hidden, candidates)

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
