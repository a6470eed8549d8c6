"""How good the best classes are where a row has several labels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import check_classes, check_int
from hstree.trees.labels import label_pairs


def precision_at_k(predicted: Tensor, labels: Any, n_classes: int, k: int) -> float:
    r"""Share of the first k predicted classes that are labels of their row, P@k.

    .. math::
        P@k = \frac{1}{N k} \sum_n \sum_{i \le k} [\hat y_{ni} \in Y_n]

    Args:
        predicted: classes, most probable first, int64 [N, K] with K >= k, such as those of
            :meth:`Head.topk`.
        labels: labels of the rows: classes [N] or [N, L], negative where a row has fewer than L, or
            a sparse matrix of scipy [N, V].
        n_classes: number of classes, V.
        k: 1 to K.

    Raises:
        ValueError: for a wrong shape or dtype, no row, or k or a label out of range.

    Example:
        >>> import torch, hstree
        >>> predicted = torch.tensor([[4, 1, 0], [2, 0, 3]])
        >>> labels = torch.tensor([[1, 4], [0, -1]])
        >>> [hstree.heads.precision_at_k(predicted, labels, 5, k) for k in (1, 2)]
        [0.5, 0.75]
    """
    predicted = check_classes("predicted", predicted).cpu()
    if predicted.ndim != 2 or not len(predicted):
        raise ValueError(f"predicted: expected shape [N, K], got {list(predicted.shape)}")
    first = predicted[:, : check_int("k", k, 1, predicted.shape[1])]
    rows, classes, n_rows = label_pairs(labels, n_classes)
    if n_rows != len(first):
        raise ValueError(f"labels: expected {len(first)} rows, got {n_rows}")
    found = torch.arange(len(first))[:, None] * n_classes + first
    return torch.isin(found, rows * n_classes + classes).double().mean().item()
