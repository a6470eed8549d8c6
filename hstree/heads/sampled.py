"""The softmax, trained on a sample of the classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_bool, check_choice, check_entries, check_int, check_nonnegative
from hstree._numerics import is_transformed
from hstree.heads.softmax import Softmax, Step, resized_rows
from hstree.heads.state import HasWeight, Tables
from hstree.ops._row_sparse import with_rows

if TYPE_CHECKING:
    from typing_extensions import Self

DISTRIBUTIONS = ("unigram", "log-uniform", "uniform")


class SampledSoftmax(Tables, Softmax):
    r"""The softmax of W h + b, trained on a sample of the classes and evaluated exactly.

    In evaluation mode (``head.eval()``) it is :class:`Softmax`. In training mode the classes of a
    step are those of K draws from a distribution q and of the N targets. For class u, :math:`m_u`
    is how often it is among these K + N, and :math:`c_u` how often in expectation for the other
    classes of a row, where p is the distribution of the targets, from ``frequencies``. They
    estimate the normalizer :math:`Z = \sum_v e^{x_v}` of the scores x = W h + b:

    .. math::
        \log \hat p_y = x_y - \log(e^{x_y} + \sum_{u \ne y} \frac{m_u}{c_u} e^{x_u}),
        \qquad c_u = K q_u + (N - 1) p_u

    Equivalent to, for int64 targets in [0, V)::

        classes, log_weight = head.draw_classes(target)  # [U] each; log(m / c)
        x = F.linear(hidden, weight[classes], bias[classes])
        is_target = classes == target[:, None]
        output = torch.where(is_target, x, x + log_weight).log_softmax(1)[is_target]
        loss = -output.mean()

    For targets that are independent draws from p, the estimate of Z is unbiased: a row's own target
    counts once, and the other N - 1 targets are draws from p. By Jensen's inequality the loss is
    too low in expectation, by O(1 / (K + N)). Targets cost no rows of W in addition to those that
    the scores of the targets need, and they are what is likely in this text. Where the targets of a
    batch depend on each other, such as in a batch of one class, the estimate is biased, and less so
    with more draws. ``in_batch=False`` leaves the targets out: :math:`m_u` counts draws, and
    :math:`c_u = K q_u`. The estimate is then unbiased for any targets.

    Draws are with replacement, one in each of K equal parts of the cumulative distribution: class v
    is drawn K q_v times in expectation, and within 2 of that in every step, which independent draws
    do not guarantee. With K = V from the uniform distribution and ``in_batch=False`` every class is
    drawn once, and the loss is exact.

    **In training mode** ``output`` **is this estimate**, and a perplexity from it is too low on
    average. ``log_prob``, ``topk``, ``predict``, ``sample`` and ``entropy`` are exact in both
    modes.

    ``head.samples_in_training = False`` takes all classes in the steps from then on. At the end of
    a long training that can be worth its time, as the estimate costs perplexity there.

    A training step takes O(N U D) time for the U <= K + N different classes, in three products;
    gradients of W and b that are dense take O(V D) more. Draws come from torch's global random
    state on the device of the head. Every process of a data-parallel training has its own, and its
    own targets.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        negatives: number of draws in a training step, K. ``"batch"``: it follows the number of rows
            of the step, N, ignored ones included: K = max(1, min(max(512, N // 2), V // 4)). A
            number: the same for all steps; with V and more, a :class:`Softmax` is cheaper. None:
            steps score all classes, and the other options of the draws are not used.
        in_batch: whether the targets of a batch are negatives for its other rows. It needs
            ``frequencies``, counts of the training text; ignored targets do not count.
        distribution: distribution of the draws, q. ``"unigram"``: proportional to the frequencies
            to the power of ``alpha``. ``"log-uniform"``: log((r + 2) / (r + 1)) / log(V + 1), where
            r = 0, 1, ... ranks the classes by decreasing frequency, or in their order without
            frequencies. ``"uniform"``: 1 / V.
        alpha: power of the frequencies; other distributions do not use it.
        sparse: whether, in training mode, W and b have row-sparse gradients with rows for targets
            and draws only, for :class:`hstree.optim.AdamW`, in one process. Does not compile.
            In float16 on a CPU torch cannot add two of them: there, call zero_grad() before every
            backward pass.
        bias, ..., frequencies: see :class:`Softmax`. Label smoothing and z-loss take the estimate
            of Z.

    Raises:
        ValueError: for an argument out of range; for ``in_batch`` or ``"unigram"`` without
            frequencies; for label smoothing or z-loss with ``sparse``.

    Example:
        >>> import torch, hstree
        >>> head = hstree.SampledSoftmax(16, 5000, negatives=64, frequencies=range(5000, 0, -1))
        >>> hidden, target = torch.randn(4, 16), torch.tensor([0, 7, 4999, 20])
        >>> head(hidden, target).loss.backward()  # of at most 68 classes
        >>> exact = head.eval()(hidden, target).output
        >>> torch.allclose(exact, head.log_prob(hidden)[torch.arange(4), target])
        True

    Source: Bengio and Senécal, Adaptive importance sampling to accelerate training of a neural
    probabilistic language model, IEEE Transactions on Neural Networks, 2008; Jean, Cho, Memisevic
    and Bengio, On using very large target vocabulary for neural machine translation, ACL 2015; for
    targets of the batch, corrected by their frequency, Yi et al., Sampling-bias-corrected neural
    modeling for large corpus item recommendations, RecSys 2019.
    """

    name = "sampled"

    cumulative: Tensor
    share: Tensor

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        negatives: int | Literal["batch"] | None = "batch",
        in_batch: bool = True,
        distribution: str = "unigram",
        alpha: float = 0.75,
        sparse: bool = False,
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
        if isinstance(negatives, str) and negatives != "batch":
            raise ValueError(
                "negatives: expected a whole number of at least 1, 'batch' or None, got "
                f"{negatives!r}"
            )
        if negatives is not None and negatives != "batch":
            negatives = check_int("negatives", negatives)
        self.negatives = negatives
        self._samples = negatives is not None
        self.in_batch = check_bool("in_batch", in_batch)
        self.distribution = check_choice("distribution", distribution, DISTRIBUTIONS)
        self.alpha = check_nonnegative("alpha", alpha)
        self.sparse = check_bool("sparse", sparse)
        for name in ("label_smoothing", "z_loss"):
            if sparse and getattr(self, name):
                raise ValueError(
                    f"{name}: expected 0 for the head {self.name!r} with sparse=True, as its "
                    f"gradient is not row-sparse, got {getattr(self, name)}; sparse=False takes it"
                )
        if negatives is None:
            if sparse:
                raise ValueError("sparse: expected False without negatives, got True")
            return
        self.register_table("cumulative", _cumulative(self._mass()))
        if self.in_batch:
            if self.frequencies is None:
                raise ValueError(
                    "frequencies: expected class counts of the targets for in_batch=True, got "
                    "None; in_batch=False takes no targets of other rows as negatives"
                )
            self.register_table("share", _share(self.frequencies))

    @property
    def samples_in_training(self) -> bool:
        """Whether training steps sample. May be set; False takes all classes from the next step
        on, with a gradient of W that is dense."""
        return self._samples

    @samples_in_training.setter
    def samples_in_training(self, samples: bool) -> None:
        if check_bool("samples_in_training", samples) and self.negatives is None:
            raise ValueError("samples_in_training: expected False without negatives, got True")
        self._samples = samples

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

    def _draws(self, rows: int) -> int:
        """Number of draws in a training step with so many rows, K."""
        if isinstance(self.negatives, int):
            return self.negatives
        # Of the shape alone, so that a compiled step of one size has one graph.
        return max(1, min(max(512, rows // 2), self.n_classes // 4))

    @torch.no_grad()
    def draw_classes(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Classes of a training step, with torch's global random state on the device of the head.

        Args:
            target: targets of the step, [N] int64; those outside [0, V) are left out.

        Returns:
            The classes of the draws and the targets, [U] int64, increasing; and log(m / c) of each,
            [U] float64. It is -inf for a class that only targets have, with ``in_batch=False``.

        Example:
            >>> import torch, hstree
            >>> options = {"negatives": 5, "distribution": "uniform", "in_batch": False}
            >>> head = hstree.SampledSoftmax(8, 5, **options)
            >>> head.draw_classes(torch.tensor([3, 0]))[0]
            tensor([0, 1, 2, 3, 4])
        """
        classes, log_weight, _ = self._draw(target)
        return classes, log_weight

    @torch.no_grad()
    def _draw(self, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`draw_classes`, and the place of each target among the classes, -1 for an ignored
        one."""
        upper, k, n_classes = self.cumulative, self._draws(target.shape[0]), self.n_classes
        per_part = upper[-1].double() / k
        # One draw in each of K equal parts of the distribution: fewer repetitions than independent
        # ones, and the same expected number of each class.
        part = torch.arange(k, dtype=torch.float64, device=upper.device)
        at = (part + torch.rand(k, dtype=torch.float64, device=upper.device)) * per_part
        drawn = torch.searchsorted(upper, at.long(), right=True).clamp(max=n_classes - 1)
        is_class = (target >= 0) & (target < n_classes)
        # A row that is left out must add no class: it stands for one that is drawn.
        known = torch.where(is_class, target, drawn[0])
        classes, order = torch.cat([drawn, known]).sort()
        is_first = classes.diff(prepend=classes.new_full((1,), -1)) != 0
        index = torch.arange(classes.shape[0], device=classes.device)
        first = torch.where(is_first, index, 0).cummax(0).values
        place = torch.empty_like(order).scatter(0, order, first)  # of each draw and each target
        counted = is_class if self.in_batch else torch.zeros_like(is_class)
        m = torch.cat([torch.ones_like(at), counted.double()])
        m = torch.zeros_like(m).index_add(0, place, m)
        c = (upper[classes] - torch.where(classes > 0, upper[classes - 1], 0)) / per_part
        if self.in_batch:
            # For each target the others are further draws, from the distribution of the text.
            c = c + (is_class.sum() - 1).clamp(min=0) * self.share[classes]
        log_weight, place = (m / c).log(), place[k:]
        # Repetitions have m = 0, so that they may stay where their number must not be read. On a
        # GPU reading it waits: all that needs no number is launched before.
        marked = torch.where(target < 0, -1, classes.shape[0])
        has_values = type(classes) is Tensor and not classes.is_meta
        if has_values and not torch.compiler.is_compiling() and not is_transformed():
            place = torch.where(is_class, (is_first.cumsum(0) - 1)[place], marked)
            index = is_first.nonzero().squeeze(1)
            return classes[index], log_weight[index], place
        # Marked targets stay marked: -1, and beyond the last class.
        return classes, log_weight, torch.where(is_class, place, marked)

    def _step(self, target: Tensor) -> Step:
        if not (self.training and self.samples_in_training):
            return super()._step(target)
        classes, log_weight, place = self._draw(target)
        if self.sparse and torch.compiler.is_compiling():
            from hstree._uncompiled import uncompiled

            weight, bias = uncompiled(gather_rows, self.weight, self.bias, classes, True)
        else:
            weight, bias = gather_rows(self.weight, self.bias, classes, self.sparse)
        return Step(weight, bias, place, classes, log_weight)

    def check_tables(self) -> None:
        super().check_tables()
        if self.negatives is None:
            return
        sums = self.cumulative
        right = (sums.diff(prepend=sums.new_zeros(1)) > 0) & (sums < 2**53)
        check_entries("cumulative", sums, right, "increasing numbers from 1, below 2^53")
        if self.in_batch:
            right = (self.share >= 0) & (self.share <= 1)
            check_entries("share", self.share, right, "a number from 0 to 1")
            total = self.share.sum(0, keepdim=True)
            check_entries("share.sum()", total, (total - 1).abs() < 1e-6, "1")

    def resize_tables(self, old: int, counts: npt.NDArray[np.float64] | None) -> None:
        if self.negatives is None:
            return
        upper = self.cumulative.cpu().double()
        width = resized_rows(upper.diff(prepend=upper.new_zeros(1)), self.n_classes).numpy()
        self.register_table("cumulative", _cumulative(width if counts is None else self._mass()))
        if self.in_batch:
            share = resized_rows(self.share.cpu(), self.n_classes).numpy()
            self.register_table("share", _share(share if counts is None else counts))

    def sparse_parameters(self) -> list[nn.Parameter]:
        parameters = self.weight, self.bias
        return [p for p in parameters if isinstance(p, nn.Parameter)] if self.sparse else []

    def config(self) -> dict[str, Any]:
        return super().config() | {
            "negatives": self.negatives,
            "in_batch": self.in_batch,
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
        # The distributions are saved, the frequencies are not.
        counts = np.ones(config["n_classes"])
        head = super().from_config(config | {"frequencies": counts}, tensors, embedding)
        head.frequencies = None
        return head

    def extra_repr(self) -> str:
        if self.negatives is None:
            return super().extra_repr()
        alpha = f", alpha={self.alpha}" if self.distribution == "unigram" else ""
        return (
            f"{super().extra_repr()}, negatives={self.negatives!r}, in_batch={self.in_batch}, "
            f"distribution={self.distribution!r}{alpha}, sparse={self.sparse}"
        )


def _cumulative(mass: npt.NDArray[np.float64]) -> Tensor:
    """Running sums [V] of whole numbers proportional to ``mass``, each at least 1, below 2^53: a
    table that keeps its values whatever the dtype of the head, exact in float64."""
    width = np.maximum((mass / mass.sum() * (2**53 - 2 * len(mass))).astype(np.int64), 1)
    return torch.from_numpy(width.cumsum())


def _share(frequencies: npt.NDArray[np.float64]) -> Tensor:
    """The distribution [V] of the targets, float64."""
    return torch.from_numpy(frequencies / frequencies.sum())


def gather_rows(
    weight: Tensor, bias: Tensor | None, classes: Tensor, sparse: bool
) -> tuple[Tensor, Tensor | None]:
    """Rows [U, D] of the weight and [U] of the bias."""
    of_bias = None if bias is None else with_rows(bias, classes, sparse=sparse)[1]
    return with_rows(weight, classes, sparse=sparse)[1], of_bias
