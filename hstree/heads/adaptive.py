"""The adaptive softmax of torch as a head, for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_int, check_number, check_order, check_sequence
from hstree._numerics import at_least_float32, input_dtype, is_transformed, no_autocast
from hstree.heads.base import Head
from hstree.heads.rows import gather_marked
from hstree.heads.state import Tables


class AdaptiveSoftmax(Tables, Head):
    """The adaptive softmax: :class:`torch.nn.AdaptiveLogSoftmaxWithLoss` with ``ignore_index``,
    ``reduction`` and an order of the classes.

    The ``cutoffs[0]`` most frequent classes have a softmax of full size. The other classes form
    clusters with projections that shrink by ``div_value`` from cluster to cluster. The shapes in
    the loss depend on the targets: torch.compile breaks the graph there and torch.export fails. The
    other methods compile to one graph. The loss of float16 on a CPU is computed in float32.

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
        if in_features // div_value ** len(cutoffs) < 1:
            raise ValueError(
                f"div_value: expected at least 1 feature in the last of {len(cutoffs)} clusters, "
                f"got {in_features} // {div_value}**{len(cutoffs)} = 0; pass fewer cutoffs or a "
                "smaller div_value"
            )
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(in_features, n_classes, cutoffs, div_value)
        self.register_table("order", order)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.adaptive.reset_parameters()

    @property
    def rank(self) -> Tensor:
        """Position of each class in ``order``, int64 [V]."""
        ranks = torch.arange(self.n_classes, device=self.order.device)
        return torch.empty_like(ranks).scatter_(0, self.order, ranks)

    def target_log_prob(self, hidden: Tensor, target: Tensor) -> Tensor:
        if is_transformed() or hidden.is_meta:  # torch's module gathers by mask
            return gather_marked(self.class_log_prob(hidden), target.unsqueeze(1)).squeeze(1)
        kept = target >= 0
        rank, module = self.rank[target[kept]], self.adaptive
        with no_autocast(hidden.device):  # which torch's module does not support
            hidden = hidden[kept].to(input_dtype(module.head))
            if hidden.dtype == torch.float16 and hidden.device.type == "cpu":
                # log_softmax of torch 2.13.0 adds up in float16: -inf for 65,520 equal logits.
                weights = {name: weight.float() for name, weight in module.named_parameters()}
                given = hidden.float(), rank
                output: Tensor = torch.func.functional_call(module, weights, given).output
            else:
                output = at_least_float32(module(hidden, rank).output)
        return output.new_zeros(len(target)).masked_scatter(kept, output)

    def class_log_prob(self, hidden: Tensor) -> Tensor:
        with no_autocast(hidden.device):
            hidden = hidden.to(input_dtype(self.adaptive.head))
            top = at_least_float32(self.adaptive.head(hidden)).log_softmax(1)
            parts = [top[:, : self.cutoffs[0]]]
            for i, cluster in enumerate(self.adaptive.tail, self.cutoffs[0]):
                parts.append(top[:, i, None] + at_least_float32(cluster(hidden)).log_softmax(1))
            return torch.cat(parts, 1).index_select(1, self.rank)

    def check_tables(self) -> None:
        check_order(self.order, self.n_classes, None)

    def config(self) -> dict[str, Any]:
        return super().config() | {"cutoffs": self.cutoffs, "div_value": self.div_value}
