"""The softmax, trained on a sample of the classes."""

from __future__ import annotations

from typing import Any

from hstree._checks import check_int
from hstree.heads.class_sampler import ClassSampler


class SampledSoftmax(ClassSampler):
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
        negatives: number of draws in a training step, K. With K of V and more, a :class:`Softmax`
            is cheaper.
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
        **options: ``bias``, ``embedding`` and ``bias_start`` of :class:`FlatHead`, and the
            arguments of :class:`Head`. Label smoothing and z-loss take the estimate of Z.

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

    def __init__(
        self, in_features: int, n_classes: int, *, negatives: int = 128, **options: Any
    ) -> None:
        super().__init__(
            in_features, n_classes, negatives=check_int("negatives", negatives), **options
        )
