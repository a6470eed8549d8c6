"""The best classes of a linear layer, by previews from quantized rows and exact scores of a few:
``torch.ops.hstree.screened_topk``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops._gradient import register_no_gradient

BLOCK = 16
"""Classes of a block of the preview."""


class Screened(NamedTuple):
    """Result of :func:`screened_topk`, in float32.

    Attributes:
        score: exact scores [N, k], largest first.
        classes: the classes [N, k] of these, int64.
        log_rest: log-sum-exp [N] of the previews, divided by the temperature, of the classes that
            are not scored exactly; -inf without one.
        log_normalizer: the same of all scores, [N].
        scores: scores of all classes, [N, V], or [0, V] if they are not wanted.

    Example:
        >>> from hstree.ops import Screened
        >>> Screened._fields
        ('score', 'classes', 'log_rest', 'log_normalizer', 'scores')
    """

    score: Tensor
    classes: Tensor
    log_rest: Tensor
    log_normalizer: Tensor
    scores: Tensor


def quantize_preview(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize rows for :func:`screened_topk`: each to multiples of its largest magnitude over
    2^(bits - 1) - 1.

    Args:
        rows: rows of the classes, [V, R].
        bits: 8 or 4.

    Returns:
        The rows in blocks of 16 classes, [V / 16, R / 4, 16, 4] int8 for 8 bits, [V / 16, R / 8,
        16, 4] uint8 for 4 (sizes rounded up): a byte holds feature i plus 8 in its low half and
        feature i + 4 plus 8 in its high half. And the scale of each class, [16 blocks] float32, 0
        for those that fill up the last block.

    Example:
        >>> import torch
        >>> from hstree.ops import quantize_preview
        >>> rows, scale = quantize_preview(torch.randn(100, 20), 4)
        >>> rows.shape, scale.shape
        (torch.Size([7, 3, 16, 4]), torch.Size([112]))
    """
    per_group = 4 if bits == 8 else 8
    rows = F.pad(rows.float(), (0, -rows.shape[1] % per_group, 0, -len(rows) % BLOCK))
    scale = rows.abs().amax(1) / (2 ** (bits - 1) - 1)
    whole = (rows / scale.clamp(min=torch.finfo(scale.dtype).tiny)[:, None]).round().to(torch.int8)
    whole = whole.view(-1, BLOCK, whole.shape[1] // per_group, per_group).transpose(1, 2)
    if bits == 4:
        low, high = (whole + 8).to(torch.uint8).chunk(2, -1)
        whole = low | high << 4
    return whole.contiguous(), scale


def screened_topk(
    query: Tensor,
    preview: Tensor,
    scale: Tensor,
    offset: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    k: int,
    *,
    temperature: float = 1.0,
    all_scores: bool = False,
) -> Screened:
    r"""The k best of the n classes with the best previews, by exact scores.

    .. math::
        a_v = o_v + x_R + s_v \, \delta \sum_{i < R} P_{vi} \, \mathrm{round}(x_i / \delta), \qquad
        \delta = \max_{i < R} |x_i| / 127

    with the query x, the preview P and its scales s, and the offsets o. The scores of the n classes
    with the largest a are :math:`W_v \cdot h + b_v`, those of all others are a. Sums of whole
    numbers are exact, others are taken in float32. Not differentiable. Deterministic for any number
    of threads; the result of a row does not depend on other rows.

    Args:
        query: R features and a number that is added to all previews of the row, [N, R + 1] float32.
        preview: quantized rows P, from :func:`quantize_preview`.
        scale: scales s, from :func:`quantize_preview`.
        offset: offsets o, [16 blocks] float32. Those that fill up the last block count for nothing.
        hidden: context vectors h, [N, D] float32, bfloat16 or float16.
        weight: W, [V, D].
        bias: b [V]; None: 0.
        n: number of classes to score exactly, in [1, V]. Of equal previews those of small numbers
            are taken; NaN counts as -inf.
        k: number of classes to return, in [1, n]. Equal ones come by number.
        temperature: divides the scores in ``log_rest`` and ``log_normalizer``.
        all_scores: whether to return the scores of all classes.

    Returns:
        See :class:`Screened`. A row with an infinite or NaN query is NaN, with the classes 0 to
        k - 1.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number.

    Example:
        >>> import torch
        >>> from hstree.ops import quantize_preview, screened_topk
        >>> weight, hidden = torch.randn(96, 20), torch.randn(5, 20)
        >>> query = torch.nn.functional.pad(hidden, (0, 1))
        >>> found = screened_topk(
        ...     query, *quantize_preview(weight, 8), torch.zeros(96), hidden, weight, None, 10, 1)
        >>> bool((found.classes[:, 0] == (hidden @ weight.T).argmax(1)).all())
        True

    Source: Shim, Lee, Choi, Boo and Sung, SVD-softmax: fast softmax approximation on large
    vocabulary neural networks, NeurIPS 2017.
    """
    return Screened(
        *torch.ops.hstree.screened_topk(
            query, preview, scale, offset, hidden, weight, bias, n, k, temperature, all_scores
        )
    )


def _fake(query: Tensor, *rest: Any) -> Any:
    weight, n_best = rest[4], rest[7]
    rows = query.shape[0]
    all_scores = len(rest) > 9 and rest[9]
    return (
        query.new_empty(rows, n_best),
        query.new_empty(rows, n_best, dtype=torch.int64),
        query.new_empty(rows),
        query.new_empty(rows),
        query.new_empty(rows if all_scores else 0, weight.shape[0]),
    )


torch.library.register_fake("hstree::screened_topk", _fake)
register_no_gradient("screened_topk", "a linear layer")
