"""The adaptive softmax of torch as a head, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call

from hstree._checks import check_int, check_number, check_order, check_sequence
from hstree._numerics import at_least_float32, input_dtype, is_transformed, no_autocast
from hstree.heads.base import Head
from hstree.heads.rows import gather_marked
from hstree.heads.state import Tables


class _Adaptive(nn.AdaptiveLogSoftmaxWithLoss):
    """Log P of the class of each rank, [N], or of all classes by rank, [N, V]."""

    def forward(self, hidden: Tensor, rank: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if rank is None:
            return self.log_prob(hidden)
        log_prob: Tensor = super().forward(hidden, rank).output
        return log_prob


class AdaptiveSoftmax(Tables, Head):
    """The adaptive softmax: :class:`torch.nn.AdaptiveLogSoftmaxWithLoss` with ``ignore_index``,
    ``reduction`` and an order of the classes.

    The ``cutoffs[0]`` most frequent classes have a softmax of full size. The other classes form
    clusters with projections that shrink by ``div_value`` from cluster to cluster. The shapes in
    the loss depend on the targets: torch.compile breaks the graph there and torch.export fails. The
    other methods compile to one graph. Float16 on a CPU is computed in float32.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V, at least 3.
        cutoffs: ranks at which the clusters of classes ordered by frequency end: increasing and
            below V. Default: those of 2,000 and 10,000 that are below V / 2, or V // 4 if none is.
        div_value: factor by which the projections shrink from cluster to cluster.
        order: classes from the most to the least frequent, int64 [V]; None: by ``frequencies``, or
            0, 1, 2, ... without them.
        ignore_index, ..., frequencies: see :class:`Head`.

    Raises:
        ValueError: if ``order`` is not a permutation, or the cutoffs do not increase within
            [1, V - 1].

    Example:
        >>> import torch, hstree
        >>> head = hstree.AdaptiveSoftmax(16, 1000, cutoffs=(100, 500))
        >>> head(torch.randn(4, 16), torch.tensor([0, 99, 100, 999])).output.shape
        torch.Size([4])

    Source: Grave, Joulin, Cissé, Grangier and Jégou, Efficient softmax approximation for GPUs,
    ICML 2017.
    """

    name = "adaptive"
    may_skip_parameters = True  # those of clusters without a target

    order: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        cutoffs: Sequence[int] | None = None,
        div_value: float = 4.0,
        order: Tensor | None = None,
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
        if n_classes < 3:
            raise ValueError(
                f"n_classes: expected at least 3 for an adaptive softmax, got {n_classes}"
            )
        if cutoffs is None:
            cutoffs = [c for c in (2000, 10000) if c < n_classes / 2] or [max(1, n_classes // 4)]
        cutoffs = [check_int("cutoffs", c, 0) for c in check_sequence("cutoffs", cutoffs)]
        increasing = all(a < b for a, b in zip([0, *cutoffs], [*cutoffs, n_classes], strict=True))
        if not cutoffs or not increasing:
            raise ValueError(
                f"cutoffs: expected increasing sizes in [1, {n_classes - 1}], got {cutoffs}"
            )
        order = check_order(order, n_classes, self.frequencies)
        self.cutoffs = cutoffs
        self.div_value = check_number("div_value", div_value, positive=True)
        smallest = int(in_features // div_value ** len(cutoffs))
        if smallest < 1:
            raise ValueError(
                f"div_value: expected at least 1 feature in the last of {len(cutoffs)} clusters, "
                f"got {in_features} // {div_value}**{len(cutoffs)} = 0; pass fewer cutoffs or a "
                "smaller div_value"
            )
        self.adaptive = _Adaptive(in_features, n_classes, cutoffs, div_value)
        self.register_table("order", order)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.adaptive.reset_parameters()

    @property
    def rank(self) -> Tensor:
        """Position of each class in ``order``, int64 [V]."""
        order = self.order
        return torch.empty_like(order).scatter_(
            0, order, torch.arange(self.n_classes, device=order.device)
        )

    def _log_prob(self, hidden: Tensor, *rank: Tensor) -> Tensor:
        if hidden.dtype != torch.float16 or hidden.device.type != "cpu":
            return at_least_float32(self.adaptive(hidden, *rank))
        # log_softmax of torch 2.13.0 on a CPU adds up in float16: -inf for 65,520 equal logits.
        weights = {name: weight.float() for name, weight in self.adaptive.named_parameters()}
        log_prob: Tensor = functional_call(self.adaptive, weights, (hidden.float(), *rank))
        return log_prob

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        # torch's module gathers by mask and does not support autocast: it gets the dtype of its
        # weights, and only the rows that are not ignored.
        with no_autocast(hidden.device):
            hidden = hidden.to(input_dtype(self.adaptive.head))
            if is_transformed() or hidden.is_meta:
                log_prob = self.class_log_prob(hidden)
                return gather_marked(log_prob, target.unsqueeze(1)).squeeze(1)
            kept = target >= 0
            output = at_least_float32(hidden.new_zeros(len(hidden)))
            if not bool(kept.any()):
                return output + hidden[kept].sum()
            log_prob = self._log_prob(hidden[kept], self.rank[target[kept]])
            return output.masked_scatter(kept, log_prob)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        with no_autocast(hidden.device):
            hidden = hidden.to(input_dtype(self.adaptive.head))
            return self._log_prob(hidden).index_select(1, self.rank)

    def check_tables(self) -> None:
        check_order(self.order, self.n_classes, None)

    def config(self) -> dict[str, Any]:
        return super().config() | {"cutoffs": self.cutoffs, "div_value": self.div_value}
