"""The softmax, and softmaxes of increasing functions of the logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_bool, check_choice, check_int, smoothed_frequencies
from hstree._numerics import at_least_float32, linear_scores, no_autocast, sum_dtype
from hstree.heads import functions
from hstree.heads.base import Head
from hstree.heads.functions import Function
from hstree.heads.state import HasWeight, fill, weight_to_tie
from hstree.ops import LogitFunction, mixture_log_prob
from hstree.ops.target_log_softmax import log_softmax

if TYPE_CHECKING:
    from typing_extensions import Self


class Step(NamedTuple):
    """The classes that a step scores: all V, or the U of a sample.

    Attributes:
        weight: their rows of W, [U, D].
        bias: their biases [U], or None.
        target: place of each target among them, [N]; -1 for an ignored one.
        classes: the classes [U], or None for all.
        offset: log(m / c) of each [U], or None for all.
    """

    weight: Tensor
    bias: Tensor | None
    target: Tensor
    classes: Tensor | None = None
    offset: Tensor | None = None


class Softmax(Head):
    r"""The softmax: P(y | h) = softmax(W h + b)[y].

    Equivalent to::

        logits = scale * F.linear(hidden, weight, bias)
        if soft_cap is not None:
            logits = soft_cap * (logits / soft_cap).tanh()
        output = -F.cross_entropy(logits, target, reduction="none")

    The loss and its gradients are computed in chunks of rows: the N x V logits are never held all
    at once. W starts uniform in [-r, r] with r = min(0.1, 1.6 / sqrt(E)), unless it is tied: as in
    AWD-LSTM up to E = 256 columns, and so that the scores of a wider one do not grow with E.

    A subclass may be softmax(f(W e(h) + b)) for an increasing function f, its ``function``, and an
    encoding e of ``weight_features`` columns, its :meth:`encode`.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        scale: factor of the logits, positive.
        soft_cap: bound of the scaled logits, positive; None: no bound.
        bias: whether there is a bias b.
        embedding: module to tie to: its weight [V, E] is used as W.
        bias_start: ``"unigram"``: the bias starts so that W = 0 gives the distribution of the
            ``frequencies``, or at 0 without them. ``"zero"``: it starts at 0 whatever they are, as
            in published code.
        function: for subclasses: increasing function f, in place of ``scale`` and ``soft_cap``; see
            ``hstree.heads.functions``.
        weight_features: for subclasses: size of an encoding, E; None: D.
        ignore_index, ..., frequencies: see :class:`Head`.

    Raises:
        TypeError: for ``function`` or ``weight_features`` of a head that is no subclass, whose
            files could not be read.
        ValueError: for ``scale`` or ``soft_cap`` beside a ``function``; and as :class:`Head`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.Softmax(16, 100)
        >>> output, loss = head(torch.randn(4, 16), torch.randint(100, (4,)))
        >>> output.shape, loss.shape
        (torch.Size([4]), torch.Size([]))
    """

    name = "softmax"
    has_normalizer = True
    resizable: ClassVar[bool] = True
    """Whether a class has nothing but its row, its bias and entries of tables."""

    for_subclasses: ClassVar[tuple[str, ...]] = ("function", "weight_features")
    """Options that the constructor of a subclass sets, so that they are no options of it."""

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        function: Function | None = None,
        weight_features: int | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )
        if type(self) is Softmax and not (function is None and weight_features is None):
            raise TypeError(
                "function, weight_features: expected None for a Softmax itself, whose files hold "
                f"neither, got {function}, {weight_features}; a subclass passes them on"
            )
        scaled = functions.Scaled(scale, soft_cap)
        if scaled.scale == 1 and scaled.soft_cap is None:
            self.function = functions.Identity() if function is None else function
        elif function is None:
            self.function = scaled
        else:
            raise ValueError(
                f"scale, soft_cap: expected 1 and None beside a function, got {scale}, {soft_cap}"
            )
        features = in_features if weight_features is None else weight_features
        self.tied = embedding is not None
        if embedding is not None:
            self.weight = weight_to_tie(embedding, n_classes, features)
        else:
            self.weight = nn.Parameter(torch.empty(n_classes, features))
        self.bias = nn.Parameter(torch.empty(n_classes)) if check_bool("bias", bias) else None
        self.bias_start = check_choice("bias_start", bias_start, ("unigram", "zero"))
        self._reset_decoder()

    @classmethod
    def from_linear(cls, linear: HasWeight, *, tied: bool = False, **options: Any) -> Self:
        """A head with the weight and bias of a linear layer, on its device and in its dtype.
        :class:`Softmax`, :class:`SampledSoftmax` and :class:`ForestSoftmax` start as the softmax of
        the layer.

        Args:
            linear: weight [V, D], with or without a bias.
            tied: use the weight of ``linear`` itself, not a copy. The bias is always a copy.
            **options: further arguments of the head, except ``bias`` and ``embedding``.

        Raises:
            ValueError: for ``bias`` or ``embedding``.

        Example:
            >>> import torch, hstree
            >>> linear, hidden = torch.nn.Linear(16, 1000), torch.randn(3, 16)
            >>> head = hstree.ForestSoftmax.from_linear(linear, clusters=32)
            >>> torch.allclose(head.log_prob(hidden), linear(hidden).log_softmax(-1), atol=1e-5)
            True
        """
        for name in ("bias", "embedding"):
            if name in options:
                raise ValueError(f"{name}: expected that of linear, got {options[name]!r}")
        weight = linear.weight
        n_classes, in_features = weight.shape
        options["bias"] = getattr(linear, "bias", None) is not None
        if check_bool("tied", tied):
            options["embedding"] = linear
        head = cls(in_features, n_classes, **options).to(weight.device, weight.dtype)
        head.copy_linear(linear)
        return head

    @torch.no_grad()
    def copy_linear(self, linear: HasWeight) -> None:
        """Take the values of the weight and bias of a linear layer; without a bias: 0."""
        if self.weight is not linear.weight:
            fill(self.weight, linear.weight)
        if self.bias is not None:
            bias = getattr(linear, "bias", None)
            fill(self.bias, self.bias.new_zeros(()) if bias is None else bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.function.reset()
        self._reset_decoder()

    def _reset_decoder(self) -> None:
        if not self.tied:
            bound = min(0.1, 1.6 / math.sqrt(self.weight.shape[1]))
            nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is None or self.bias.is_meta:
            return
        if self.frequencies is None or self.bias_start == "zero":
            nn.init.zeros_(self.bias)
        else:
            log_share = np.log(self.frequencies) - np.log(self.frequencies.sum())
            value = torch.from_numpy(log_share).to(self.bias.device)
            fill(self.bias, self.function.inverse(value))

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self._log_prob_and_loss(hidden, target, "none")[0]

    def target_loss(self, hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        smoothed = self.label_smoothing > 0
        if self.z_loss or (smoothed and not (self.has_linear_scores and self.class_weight is None)):
            return super().target_loss(hidden, target)
        output, loss = self._log_prob_and_loss(hidden, target, self.reduction)
        if smoothed:
            # (1 - eps) nll + eps mean_v(-log p_v) = nll + eps (x_y - mean_v x_v)
            kept = self.target_weight(target, output.dtype)
            loss = loss + self.label_smoothing * self.reduced(
                kept * (self.target_score(hidden, target) - self._mean_score(hidden)), kept
            )
        return output, loss

    def _log_prob_and_loss(
        self, hidden: Tensor, target: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor]:
        latent, log_prior = self.components(hidden)
        step = self._step(target)
        return mixture_log_prob(
            latent,
            log_prior,
            step.weight,
            step.bias,
            step.target,
            self.function(sum_dtype(hidden.dtype), hidden.device),
            offset=step.offset,
            row_weight=self._row_weight(hidden, target),
            reduction=reduction,
        )

    def _step(self, target: Tensor) -> Step:
        """The classes that score the targets [N], in the mode of the head."""
        return Step(self.weight, self.bias, target)

    def _row_weight(self, hidden: Tensor, target: Tensor) -> Tensor | None:
        """Factors [N] of the rows in the loss."""
        if self.class_weight is None:
            return None
        return self.target_weight(target, sum_dtype(hidden.dtype))

    @property
    def has_linear_scores(self) -> bool:
        """Whether one softmax normalizes scores f(x_v) that are W e + b."""
        return self.has_normalizer and isinstance(self.function, functions.Identity)

    def target_score(self, hidden: Tensor, target: Tensor) -> Tensor:
        target = target.clamp(0, self.n_classes - 1)
        latent = at_least_float32(self.components(hidden)[0].squeeze(1))
        logit = (latent * at_least_float32(F.embedding(target, self.weight))).sum(1)
        if self.bias is not None:
            logit = logit + at_least_float32(self.bias)[target]
        function: LogitFunction = self.function(logit.dtype, logit.device)
        return function(logit)

    def mean_loss(self, hidden: Tensor, target: Tensor, output: Tensor) -> Tensor:
        if not self.has_linear_scores:
            return super().mean_loss(hidden, target, output)
        log_normalizer = self.target_score(hidden, target) - output
        mean = 1.0 if self.class_weight is None else self.class_weight.to(output.dtype).mean()
        return mean * log_normalizer - self._mean_score(hidden)

    def _mean_score(self, hidden: Tensor) -> Tensor:
        """Mean [N] of c_v x_v over all classes v, from the mean row of W."""
        weight, dtype = self.class_weight, sum_dtype(hidden.dtype)
        with no_autocast(hidden.device):
            if weight is None:
                row = self.weight.mean(0, dtype=dtype)
                bias = None if self.bias is None else self.bias.mean(dtype=dtype)
            else:
                weight = weight.to(dtype) / self.n_classes
                row, bias = weight @ self.weight.to(dtype), self.bias
                if bias is not None:  # not 0 times inf
                    bias = weight @ bias.to(dtype).masked_fill(weight == 0, 0.0)
            mean = self.components(hidden)[0].squeeze(1).to(dtype) @ row.to(dtype)
            return mean if bias is None else mean + bias

    def components(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors [N, K, E] in the result of :meth:`encode`, and log-priors [N, K] if K > 1."""
        return hidden[:, None], None

    def class_scores(self, hidden: Tensor) -> Tensor:
        given = self.component_scores if self.has_normalizer else super().class_scores
        return given(hidden)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return log_softmax(self.class_scores(hidden))

    def component_scores(self, latent: Tensor) -> Tensor:
        """f(W z + b) [N, V] of one component: latent z [N, E]."""
        logits = linear_scores(latent, self.weight, self.bias)
        function: LogitFunction = self.function(logits.dtype, logits.device)
        return function(logits)

    @torch.no_grad()
    def resized(
        self,
        num_classes: int,
        *,
        frequencies: npt.ArrayLike | None = None,
        embedding: HasWeight | None = None,
    ) -> Self:
        """A new head with more or fewer classes, which starts from what this one has learned.

        It has the kind, options, dtype, device and mode of this head, and trains the same
        parameters. Classes 0 to min(V, num_classes) - 1 keep their rows and biases; their
        probabilities are renormalized, in each component of a mixture and each tree of a forest.
        Optimizers need the parameters of the new head. No random numbers are drawn.

        New classes get the mean row of the old ones, and the mean of their biases. So does
        ``class_weight``. In each tree of a forest a new class joins the smallest cluster.

        Args:
            num_classes: number of classes of the new head.
            frequencies: class counts [num_classes], of old and new classes: where vectors are zero,
                new classes start with their share; None: with the geometric mean of the old ones.
                Later they are the frequencies of the new head, for :meth:`reset_parameters` and for
                negatives. Heads without biases do not read them.
            embedding: for a tied head, the module whose weight [num_classes, D] the new head is
                tied to. None: it is not tied, and gets a copy of the rows.

        Raises:
            ValueError: for an argument out of range; for a weight or a bias on the meta device,
                sharded, or computed from others; if ``ignore_index`` would become a class; for a
                forest with more clusters than classes.
            NotImplementedError: for a head with other parameters of the classes: :class:`Mixtape`
                and, beyond this class, trees, the adaptive and the screened softmax.

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
        if not self.resizable:
            return super().resized(num_classes)
        size, old = check_int("num_classes", num_classes), self.n_classes
        if old <= self.ignore_index < size:
            raise ValueError(
                f"num_classes: expected at most {self.ignore_index}, the ignore_index of the head, "
                f"which would become a class, got {size}"
            )
        if embedding is not None and not self.tied:
            raise ValueError("embedding: expected None, since the head is not tied")
        weight, bias = _whole(self, "weight"), _whole(self, "bias")
        assert weight is not None
        counts = None if frequencies is None else smoothed_frequencies(frequencies, size)
        made = copy.deepcopy(self)
        made.n_classes, made.frequencies = size, counts
        if counts is None and self.frequencies is not None:
            new = np.exp(np.log(self.frequencies).mean())
            made.frequencies = np.append(self.frequencies, np.full(max(size - old, 0), new))[:size]
        if embedding is None:
            made.weight = _parameter(resized_rows(weight, size), weight)
        else:
            made.weight = weight_to_tie(embedding, size, weight.shape[1])
        made.tied = embedding is not None
        if bias is not None:
            rows = resized_rows(bias, size)
            if counts is not None and size > old:
                # Where W h is 0: exp f(b) of a new class is its share of the sum of the old ones.
                share = torch.from_numpy(np.log(counts[old:]) - np.log(counts[:old].sum()))
                scores = self.function(torch.float64, bias.device)(bias.double())
                rows[old:] = self.function.solve(share.to(bias.device) + scores.logsumexp(0))
            made.bias = _parameter(rows, bias)
        if self.class_weight is not None:
            class_weight = resized_rows(self.class_weight, size)
            made.register_constant("class_weight", class_weight)
            made.class_weight = class_weight  # on the device of the head
        made.resize_tables(old, counts)
        return made

    def resize_tables(self, old: int, counts: npt.NDArray[np.float64] | None) -> None:
        """Give the tables of this head the size of ``n_classes``: ``old`` classes before, and their
        frequencies, or None."""

    def tied_parameters(self) -> Iterator[Tensor]:
        if self.tied:
            yield self.weight

    def decoder_config(self) -> dict[str, Any]:
        """:meth:`config` without the options of f."""
        return super().config() | {"bias": self.bias is not None, "tied": self.tied}

    def config(self) -> dict[str, Any]:
        return self.decoder_config() | self.function.config()


class SigSoftmax(Softmax):
    """Sigsoftmax: P(y | h) is proportional to exp(l) sigmoid(l), with logits l = W h + b.

    Equivalent to::

        logits = F.linear(hidden, weight, bias)
        output = -F.cross_entropy(logits + F.logsigmoid(logits), target, reduction="none")

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.SigSoftmax(16, 100)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Kanai, Fujiwara, Yamanaka and Adachi, Sigsoftmax: reanalysis of the softmax bottleneck,
    NeurIPS 2018.
    """

    name = "sigsoftmax"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            function=functions.SigSoftmax(),
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )


class GSS(Softmax):
    """Generalized sigsoftmax: softmax(f(W h + b)).

    f(x) = k (x - c) + c - (k - 1) log(1 + exp(x - c)) has slope k far below c and slope 1 far
    above c. c = 0, k = 2 is :class:`SigSoftmax`; k = 1 is :class:`Softmax`. Both numbers are fixed
    before training: (-1.5, 2.5) for Penn Treebank, (-1.5, 3) for WikiText-2.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        c: point at which f bends.
        k: slope of f far below c, positive.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.GSS(16, 100, c=-1.5, k=2.5)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])
    """

    name = "gss"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        c: float = -1.5,
        k: float = 2.5,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__(
            in_features,
            n_classes,
            function=functions.GSS(c, k),
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )


class PLIF(Softmax):
    """Softmax of a learned piecewise linear increasing function of the logits (LMS-PLIF).

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        intervals: number of equal intervals of [-R, R], K; interval j has the slope softplus(v_j).
        radius: half width of the range of the intervals, R.
        frozen: keep v at its initial values.
        slope_std: standard deviation of the initial v, whose mean is log(e - 1), slope 1. With 0
            the head starts as a :class:`Softmax`.
        slope_learning_rate: learning rate of v in :meth:`parameter_groups`, whatever that of the
            head is.
        slope_decay: weight decay of v in :meth:`parameter_groups`.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.PLIF(16, 100, intervals=1000)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Ganea, Gelly, Bécigneul and Severyn, Breaking the softmax bottleneck via learnable
    monotonic pointwise non-linearities, ICML 2019.
    """

    name = "plif"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        intervals: int = 100_000,
        radius: float = 20.0,
        frozen: bool = False,
        slope_std: float = 1.0,
        slope_learning_rate: float = 0.02,
        slope_decay: float = 0.0,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        function = functions.PLIF(
            intervals,
            radius,
            frozen,
            slope_std=slope_std,
            slope_learning_rate=slope_learning_rate,
            slope_decay=slope_decay,
        )
        super().__init__(
            in_features,
            n_classes,
            function=function,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )


class MonotonicNetwork(Softmax):
    """Softmax of a learned monotonic network of the logits (LMS-NN).

    f(x) = sum_i v_i sigmoid(u_i x + b_i) with positive v and u. The K sigmoids are computed at a
    few thousand knots instead of at N V logits, and f is interpolated: see
    ``hstree.heads.functions.MonotonicNetwork``.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        units: number of hidden units, K.
        intervals: number of intervals between the knots at which f is computed.
        bias, ..., frequencies: see :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.MonotonicNetwork(16, 100, units=50)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Ganea, Gelly, Bécigneul and Severyn, Breaking the softmax bottleneck via learnable
    monotonic pointwise non-linearities, ICML 2019. No code of the authors for it was found: the
    initial values and the softplus of u and v could not be compared with it. The interpolation is
    hstree's own.
    """

    name = "monotonic"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        units: int = 1000,
        intervals: int = 4096,
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Any = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        frequencies: npt.ArrayLike | None = None,
    ) -> None:
        function = functions.MonotonicNetwork(units, intervals)
        super().__init__(
            in_features,
            n_classes,
            function=function,
            bias=bias,
            embedding=embedding,
            bias_start=bias_start,
            ignore_index=ignore_index,
            reduction=reduction,
            class_weight=class_weight,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            frequencies=frequencies,
        )


def resized_rows(values: Tensor, size: int) -> Tensor:
    """The first ``size`` of the values [V, ...]; those beyond V are the mean of the finite ones."""
    added = max(size - len(values), 0)
    known = values.double() if values.dtype == torch.float64 else values.float()
    mean = known.masked_fill(~known.isfinite(), torch.nan).nanmean(0).nan_to_num()
    return torch.cat([values[:size], mean.to(values).expand(added, *values.shape[1:])])


def _whole(head: nn.Module, name: str) -> Any:
    value = getattr(head, name)
    if value is None:
        return None
    computed = head._parameters.get(name) is not value
    if computed or value.is_meta or hasattr(value, "device_mesh"):
        raise ValueError(
            f"resized: expected a whole {name} with data, a parameter of the head itself, got one "
            "that is computed from others, sharded, or on the meta device; first end pruning or "
            "parametrization (torch.nn.utils.prune.remove, parametrize.remove_parametrizations), "
            "and resize a head before it is sharded"
        )
    return value


def _parameter(values: Tensor, old: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(values.to(old), requires_grad=old.requires_grad)
