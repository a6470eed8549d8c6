"""The softmax, and softmaxes of increasing functions of the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hstree.heads import functions
from hstree.heads.flat import FlatHead, FlatOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Softmax(FlatHead):
    r"""The softmax: P(y | h) = softmax(W h + b)[y].

    Equivalent to::

        logits = scale * F.linear(hidden, weight, bias)
        if soft_cap is not None:
            logits = soft_cap * (logits / soft_cap).tanh()
        output = -F.cross_entropy(logits, target, reduction="none")

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        scale: factor of the logits, positive.
        soft_cap: bound of the scaled logits, positive; None: no bound.
        **options: ``bias``, ``embedding`` and ``bias_start`` of :class:`FlatHead`, and the
            arguments of :class:`Head`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.Softmax(16, 100)
        >>> output, loss = head(torch.randn(4, 16), torch.randint(100, (4,)))
        >>> output.shape, loss.shape
        (torch.Size([4]), torch.Size([]))
    """

    name = "softmax"

    def __init__(
        self,
        in_features: int,
        n_classes: int,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
        **options: Unpack[FlatOptions],
    ) -> None:
        function = functions.Scaled(scale, soft_cap)
        plain = function.scale == 1 and function.soft_cap is None
        super().__init__(
            in_features, n_classes, function=functions.Identity() if plain else function, **options
        )

    def config(self) -> dict[str, Any]:
        return {"scale": 1.0, "soft_cap": None} | super().config()


class SigSoftmax(FlatHead):
    """Sigsoftmax: P(y | h) is proportional to exp(l) sigmoid(l), with logits l = W h + b.

    Equivalent to::

        logits = F.linear(hidden, weight, bias)
        output = -F.cross_entropy(logits + F.logsigmoid(logits), target, reduction="none")

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        **options: further arguments of :class:`Softmax`.

    Example:
        >>> import torch, hstree
        >>> head = hstree.SigSoftmax(16, 100)
        >>> head(torch.randn(4, 16), torch.arange(4)).output.shape
        torch.Size([4])

    Source: Kanai, Fujiwara, Yamanaka and Adachi, Sigsoftmax: reanalysis of the softmax bottleneck,
    NeurIPS 2018.
    """

    name = "sigsoftmax"

    def __init__(self, in_features: int, n_classes: int, **options: Unpack[FlatOptions]) -> None:
        super().__init__(in_features, n_classes, function=functions.SigSoftmax(), **options)


class GSS(FlatHead):
    """Generalized sigsoftmax: softmax(f(W h + b)).

    f(x) = k (x - c) + c - (k - 1) log(1 + exp(x - c)) has slope k far below c and slope 1 far
    above c. c = 0, k = 2 is :class:`SigSoftmax`; k = 1 is :class:`Softmax`. Both numbers are fixed
    before training: (-1.5, 2.5) for Penn Treebank, (-1.5, 3) for WikiText-2.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        c: point at which f bends.
        k: slope of f far below c, positive.
        **options: further arguments of :class:`Softmax`.

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
        **options: Unpack[FlatOptions],
    ) -> None:
        super().__init__(in_features, n_classes, function=functions.GSS(c, k), **options)


class PLIF(FlatHead):
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
        **options: further arguments of :class:`Softmax`.

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
        **options: Unpack[FlatOptions],
    ) -> None:
        function = functions.PLIF(
            intervals,
            radius,
            frozen,
            slope_std=slope_std,
            slope_learning_rate=slope_learning_rate,
            slope_decay=slope_decay,
        )
        super().__init__(in_features, n_classes, function=function, **options)


class MonotonicNetwork(FlatHead):
    """Softmax of a learned monotonic network of the logits (LMS-NN).

    f(x) = sum_i v_i sigmoid(u_i x + b_i) with positive v and u. The K sigmoids are computed at a
    few thousand knots instead of at N V logits, and f is interpolated: see
    ``hstree.heads.functions.MonotonicNetwork``.

    Args:
        in_features: number of input features, D.
        n_classes: number of classes, V.
        units: number of hidden units, K.
        intervals: number of intervals between the knots at which f is computed.
        **options: further arguments of :class:`Softmax`.

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
        **options: Unpack[FlatOptions],
    ) -> None:
        function = functions.MonotonicNetwork(units, intervals)
        super().__init__(in_features, n_classes, function=function, **options)
