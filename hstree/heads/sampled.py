"""The softmax, trained on a sample of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_bool, check_choice, check_int, check_nonnegative
from hstree._numerics import at_least_float32, linear_scores, log_sum_exp
from hstree.heads.flat import FlatHead
from hstree.heads.resizing import ClassChange
from hstree.heads.tables import Tables
from hstree.heads.tying import HasWeight
from hstree.ops._row_sparse import with_rows

if TYPE_CHECKING:
    from typing_extensions import Self

DISTRIBUTIONS = ("unigram", "log-uniform", "uniform")


class SampledSoftmax(Tables, FlatHead):
    r"""The softmax of W h + b, trained by sampled softmax and evaluated exactly.

    In evaluation mode (``head.eval()``) it is :class:`Softmax`. In training mode ``forward`` draws
    K negatives :math:`c_1, ..., c_K`, shared by all rows, and estimates the normalizer
    :math:`Z = \sum_v e^{x_v}` of the scores x = W h + b:

    .. math::
        \hat Z = e^{x_y} + \sum_{k :\, c_k \ne y} \frac{e^{x_{c_k}}}{K q_{c_k}}, \qquad
        \log \hat p_y = x_y - \log \hat Z

    Equivalent to, for int64 targets in [0, V)::

        classes, log_count = head.draw_negatives()  # [K] each; log_count = log(K q)
        x = F.linear(hidden, weight[classes], bias[classes]) - log_count
        x = x.masked_fill(classes == target[:, None], -torch.inf)  # accidental hits
        x_y = (hidden * weight[target]).sum(1) + bias[target]
        output = x_y - torch.cat([x_y[:, None], x], 1).logsumexp(1)
        loss = -output.mean()

    Negatives are drawn with replacement, one in each of K equal parts of the cumulative
    distribution: class v is drawn K q_v times in expectation, and within 2 of that in every step,
    which independent draws do not guarantee. With K = V from the uniform distribution every class
    is drawn once, and the loss is exact. The target has no such correction, because it is counted
    in every step. So the estimate of Z is unbiased; by Jensen's inequality the loss is too low in
    expectation, by O(1/K).

    **In training mode** ``output`` **is this estimate**, and a perplexity from it is too low on
    average. ``log_prob``, ``topk``, ``predict``, ``sample`` and ``entropy`` are exact in both
    modes.

    A training step takes O(N K D) time and O(N K) memory for N rows; gradients of W and b that are
    dense take O(V D) more. Negatives come from torch's global random state on the device of the
    head, so every process of a data-parallel training draws its own.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        negatives: number of negatives in a training step, K. With K of V and more, a
            :class:`Softmax` is cheaper.
        distribution: distribution of the negatives, q. ``"unigram"``: proportional to the
            frequencies to the power of ``alpha``. ``"log-uniform"``: log((r + 2) / (r + 1)) /
            log(V + 1), where r = 0, 1, ... ranks the classes by decreasing frequency, or in their
            order without frequencies. ``"uniform"``: 1 / V.
        alpha: power of the frequencies; other distributions do not use it.
        sparse: whether, in training mode, W and b have row-sparse gradients with rows for targets
            and negatives only, for :class:`hstree.optim.AdamW`. Does not compile.
            In float16 on a CPU torch cannot add two of them: there, call zero_grad() before every
            backward pass.
        **options: ``bias``, ``embedding`` and ``bias_start`` of :class:`FlatHead`, and the
            arguments of :class:`Head`. Label smoothing and z-loss take the estimate of Z.

    Raises:
        ValueError: for an argument out of range; for ``"unigram"`` without frequencies; for label
            smoothing or z-loss with ``sparse``.

    Example:
        >>> import torch, hstree
        >>> head = hstree.SampledSoftmax(16, 5000, negatives=64, frequencies=range(5000, 0, -1))
        >>> hidden, target = torch.randn(4, 16), torch.tensor([0, 7, 4999, 20])
        >>> head(hidden, target).loss.backward()  # of 64 negatives
        >>> exact = head.eval()(hidden, target).output
        >>> torch.allclose(exact, head.log_prob(hidden)[torch.arange(4), target])
        True

    Source: Bengio and Senécal, Adaptive importance sampling to accelerate training of a neural
    probabilistic language model, IEEE Transactions on Neural Networks, 2008; Jean, Cho, Memisevic
    and Bengio, On using very large target vocabulary for neural machine translation, ACL 2015.
    """

    name = "sampled"
    samples_in_training = True

    cumulative: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        negatives: int = 1024,
        distribution: str = "unigram",
        alpha: float = 0.75,
        sparse: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, n_classes, **options)
        self.negatives = check_int("negatives", negatives)
        self.distribution = check_choice("distribution", distribution, DISTRIBUTIONS)
        self.alpha = check_nonnegative("alpha", alpha)
        self.sparse = check_bool("sparse", sparse)
        for name in ("label_smoothing", "z_loss"):
            if sparse and getattr(self, name):
                raise ValueError(
                    f"{name}: expected 0 for the head 'sampled' with sparse=True, as its gradient "
                    f"is not row-sparse, got {getattr(self, name)}; sparse=False takes it"
                )
        self.register_table("cumulative", _cumulative(self._mass()))

    def _mass(self) -> npt.NDArray[np.float64]:
        """Positive numbers [V], proportional to q."""
        count, frequencies = self.n_classes, self.frequencies
        if self.distribution == "uniform":
            return np.ones(count)
        if self.distribution == "log-uniform":
            mass = np.log1p(1.0 / np.arange(1, count + 1))
            if frequencies is not None:
                mass[np.argsort(-frequencies, kind="stable")] = mass.copy()
            return mass
        if frequencies is None:
            raise ValueError(
                "frequencies: expected class counts for negatives from the distribution 'unigram', "
                "got None; 'log-uniform' is for classes in the order of their frequency"
            )
        power: npt.NDArray[np.float64] = (frequencies / frequencies.max()) ** self.alpha
        return power

    @torch.no_grad()
    def draw_negatives(self) -> tuple[Tensor, Tensor]:
        """Negatives of a training step.

        Returns:
            Classes [K], int64, increasing, drawn with torch's global random state on the device of
            the head; and the logarithm of the expected number of draws of each, log(K q) [K],
            float64.

        Example:
            >>> import hstree
            >>> head = hstree.SampledSoftmax(8, 5, negatives=5, distribution="uniform")
            >>> head.draw_negatives()[0]
            tensor([0, 1, 2, 3, 4])
        """
        upper, k = self.cumulative, self.negatives
        per_part = upper[-1].double() / k
        part = torch.arange(k, dtype=torch.float64, device=upper.device)
        at = (part + torch.rand(k, dtype=torch.float64, device=upper.device)) * per_part
        classes = torch.searchsorted(upper, at.long(), right=True).clamp(max=self.n_classes - 1)
        width = upper[classes] - torch.where(classes > 0, upper[classes - 1], 0)
        return classes, (width.double() / per_part).log()

    def _log_prob_and_loss(
        self, hidden: Tensor, target: Tensor, reduction: str
    ) -> tuple[Tensor, Tensor]:
        if not self.training:
            return super()._log_prob_and_loss(hidden, target, reduction)
        output = self._estimate(hidden, target)
        weight = self.target_weight(target, output.dtype)
        loss = -weight * output
        return output, loss if reduction == "none" else self.reduced(loss, weight)

    def _estimate(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probabilities [N] of the targets with the estimate of Z."""
        classes, log_count = self.draw_negatives()
        ignored = target == -1
        hidden = hidden.masked_fill(ignored[:, None], 0)  # it may hold infinities
        # A row without a target reads one that is read anyway, and gives it no gradient.
        known = torch.where(ignored | (target >= self.n_classes), classes[0], target)
        rows = torch.cat([known, classes])
        if self.sparse and torch.compiler.is_compiling():
            from hstree._uncompiled import uncompiled

            weight, bias = uncompiled(gather_rows, self.weight, self.bias, rows, True)
        else:
            weight, bias = gather_rows(self.weight, self.bias, rows, self.sparse)
        parts = [known.shape[0], self.negatives]  # len() would fix the number in an export
        own, others = torch.split(weight, parts)
        score = (at_least_float32(hidden) * at_least_float32(own)).sum(1)
        scores = linear_scores(hidden, others)
        offset = -log_count.to(scores.dtype)
        if bias is not None:
            own_bias, other_bias = torch.split(at_least_float32(bias), parts)
            score, offset = score + own_bias, offset + other_bias
        scores = (scores + offset).masked_fill(classes == target[:, None], -torch.inf)
        output = F.logsigmoid(score - log_sum_exp(scores, 1))
        return output.masked_fill(target >= self.n_classes, torch.nan).masked_fill(ignored, 0.0)

    def resize_classes(self, change: ClassChange) -> None:
        super().resize_classes(change)
        cumulative = self.cumulative.cpu().double()
        width = change.rows(cumulative.diff(prepend=cumulative.new_zeros(1))).numpy()
        if change.frequencies is not None:
            self.n_classes = change.new
            width = self._mass()
        self.register_table("cumulative", _cumulative(width))

    def sparse_parameters(self) -> list[nn.Parameter]:
        return list(self.parameters(recurse=False)) if self.sparse else []

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "negatives": self.negatives,
            "distribution": self.distribution,
            "alpha": self.alpha,
            "sparse": self.sparse,
        }

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        tensors: Mapping[str, Tensor],
        embedding: HasWeight | None = None,
    ) -> Self:
        # The distribution is saved, the frequencies are not.
        head = super().from_config(config | {"distribution": "uniform"}, tensors, embedding)
        head.distribution = config["distribution"]
        return head

    def extra_repr(self) -> str:
        alpha = f", alpha={self.alpha}" if self.distribution == "unigram" else ""
        return (
            f"{super().extra_repr()}, negatives={self.negatives}, "
            f"distribution={self.distribution!r}{alpha}, sparse={self.sparse}"
        )


def _cumulative(mass: npt.NDArray[np.float64]) -> Tensor:
    """Running sums [V] of whole numbers proportional to ``mass``, each at least 1, below 2^53: a
    table that keeps its values whatever the dtype of the head, exact in float64."""
    width = np.maximum((mass / mass.sum() * (2**53 - 2 * len(mass))).astype(np.int64), 1)
    return torch.from_numpy(width.cumsum())


def gather_rows(
    weight: Tensor, bias: Tensor | None, rows: Tensor, sparse: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows [n, D] of the weight and [n] of the bias."""
    if not sparse:
        return F.embedding(rows, weight), None if bias is None else bias[rows]
    of_bias = None if bias is None else with_rows(bias, rows, sparse=True)[1]
    return with_rows(weight, rows, sparse=True)[1], of_bias
