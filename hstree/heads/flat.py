"""The base of heads with one row of weights for each class."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_bool
from hstree._numerics import at_least_float32, linear_scores, no_autocast, sum_dtype
from hstree.heads import functions
from hstree.heads.base import Head, HeadOptions
from hstree.heads.functions import Function
from hstree.heads.resizing import resized_head
from hstree.heads.state import HasWeight, adopt_tables, fill, weight_to_tie
from hstree.ops import LogitFunction, mixture_log_prob
from hstree.ops.target_log_softmax import log_softmax

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


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


class FlatOptions(HeadOptions, total=False):
    """Keywords of :class:`FlatHead` that the constructors of its subclasses pass on."""

    bias: bool
    embedding: HasWeight | None
    bias_start: str


class FlatHead(Head):
    r"""P(y | h) = softmax(f(W e(h) + b))[y] for an increasing function f and an encoding e.

    The loss and its gradients are computed in chunks of rows: the N x V logits are never held all
    at once. W starts uniform in [-r, r] with r = min(0.1, 1.6 / sqrt(E)), unless it is tied: as in
    AWD-LSTM up to E = 256 columns, and so that the scores of a wider one do not grow with E.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        bias: whether there is a bias b.
        embedding: embedding to tie to: its weight [V, E] is used as W.
        bias_start: ``"unigram"``: the bias starts so that W = 0 gives the distribution of the
            ``frequencies``, or at 0 without them. ``"zero"``: it starts at 0 whatever they are, as
            in published code.
        function: increasing function f; None: the identity. See ``hstree.heads.functions``.
        weight_features: size of an encoding, E; None: D.
        **options: further arguments of :class:`Head`.

    Example:
        >>> import torch, hstree
        >>> from hstree.heads.functions import GSS
        >>> head = hstree.heads.FlatHead(16, 100, function=GSS(c=0.0, k=2.0))
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])
    """

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
        bias: bool = True,
        embedding: HasWeight | None = None,
        bias_start: str = "unigram",
        function: Function | None = None,
        weight_features: int | None = None,
        **options: Unpack[HeadOptions],
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        features = in_features if weight_features is None else weight_features
        self.tied = embedding is not None
        if embedding is not None:
            self.weight = weight_to_tie(embedding, n_classes, features)
        else:
            self.weight = nn.Parameter(torch.empty(n_classes, features))
        self.bias = nn.Parameter(torch.empty(n_classes)) if check_bool("bias", bias) else None
        self.function = functions.Identity() if function is None else function
        if bias_start not in ("unigram", "zero"):
            raise ValueError(f"bias_start: expected 'unigram' or 'zero', got {bias_start!r}")
        self.bias_start = bias_start
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
        if self.z_loss or (smoothed and not (self.linear_scores and self.class_weight is None)):
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
    def linear_scores(self) -> bool:
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
        if not self.linear_scores:
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

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        return self.component_log_prob(hidden)

    def component_log_prob(self, latent: Tensor) -> Tensor:
        """Log-probabilities [N, V] of one component: latent [N, E]."""
        logits = linear_scores(latent, self.weight, self.bias)
        function: LogitFunction = self.function(logits.dtype, logits.device)
        return log_softmax(function(logits))

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
        made: Self = resized_head(self, num_classes, frequencies, embedding)
        return made

    def resize_tables(self, old: int, counts: npt.NDArray[np.float64] | None) -> None:
        """Give the tables of this head the size of ``n_classes``: ``old`` classes before, and their
        frequencies, or None."""

    def _groups_apart(self, lr: float) -> list[dict[str, Any]]:
        return self.function.parameter_groups(lr)

    def _apart(self) -> Iterator[Tensor]:
        yield from self.function.parameters()
        if self.tied:
            yield self.weight

    def decoder_config(self) -> dict[str, Any]:
        """:meth:`config` without the options of f."""
        return super().config() | {"bias": self.bias is not None, "tied": self.tied}

    def config(self) -> dict[str, Any]:
        return self.decoder_config() | self.function.config()

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: HasWeight | None = None,
    ) -> Self:
        options = dict(config)
        tied = options.pop("tied")
        head = cls(
            **options,
            embedding=embedding if tied else None,
            class_weight=tensors.get("class_weight"),
        )
        adopt_tables(head, tensors)
        return head
