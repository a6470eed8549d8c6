"""The labels of a data set in which a row has several, and class vectors from its features."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.trees.means import ContextMeans
from hstree.trees.vectors import right_singular_vectors

MOST_FEATURES = 128
_PIECE = 1 << 16


def label_pairs(labels: Any, n_classes: int) -> tuple[Tensor, Tensor]:
    """Row and class int64 [P] of each label.

    Args:
        labels: classes, integers [N] or [N, K], negative where a row has fewer than K labels; or a
            sparse matrix of scipy [N, V] with an entry for each label.

    Raises:
        ValueError: for another shape or dtype, or a class out of range.
    """
    if hasattr(labels, "tocoo"):
        entries = labels.tocoo()
        if entries.shape[1] != n_classes:
            raise ValueError(
                f"labels: expected a sparse matrix with {n_classes} columns, got {entries.shape}"
            )
        kept = entries.data != 0
        row, column = (i[kept].astype(np.int64) for i in (entries.row, entries.col))
        return torch.from_numpy(row), torch.from_numpy(column)
    given = torch.as_tensor(labels).cpu()
    if given.is_floating_point() or given.is_complex() or given.ndim not in (1, 2):
        raise ValueError(
            f"labels: expected integers [N] or [N, K], got {given.dtype} of shape "
            f"{list(given.shape)}"
        )
    given = given.long().view(len(given), -1)
    if given.numel() and int(given.max()) >= n_classes:
        raise ValueError(f"labels: expected classes below {n_classes}, got {int(given.max())}")
    rows, column = (given >= 0).nonzero(as_tuple=True)
    return rows, given[rows, column]


def label_means(features: Any, labels: Any, n_classes: int, *, seed: int = 0) -> ContextMeans:
    """The mean features of the rows of each label, for :meth:`ContextMeans.vectors`.

    More than 128 features are first projected on their 128 largest singular vectors.

    Args:
        features: real [N, F], a tensor, an array or a sparse matrix of scipy.
        labels: see :meth:`hstree.heads.TreeEnsemble.from_features`.
        n_classes: number of classes, V.
        seed: seed of the start vector of the iterative decomposition.

    Raises:
        ValueError: for another shape, or if there is no label.

    Example:
        >>> import torch, hstree
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> means = hstree.trees.label_means(features, [[0, 1], [0, -1], [2, -1]], n_classes=3)
        >>> means.count.tolist(), (means.sum / means.count[:, None]).tolist()[1]
        ([2, 1, 1], [1.0, 0.0])
    """
    rows, classes = label_pairs(labels, n_classes)
    if isinstance(features, Tensor):
        features = features.detach().cpu().numpy()
    if not hasattr(features, "tocsr"):
        features = np.asarray(features)
    if len(features.shape) != 2:
        raise ValueError(f"features: expected shape [N, F], got {list(features.shape)}")
    if not len(rows) or int(rows.max()) >= features.shape[0]:
        n_rows = f"{int(rows.max()) + 1} rows" if len(rows) else "none"
        raise ValueError(
            f"labels: expected those of the {features.shape[0]} rows of features, got {n_rows}"
        )
    if features.shape[1] > MOST_FEATURES:
        _, axes = right_singular_vectors(features, MOST_FEATURES, seed)
        features = features @ axes.T
    elif hasattr(features, "toarray"):
        features = features.toarray()
    dense: npt.NDArray[np.float32] = np.asarray(features, np.float32)
    means = ContextMeans(n_classes, dense.shape[1])
    of_rows = torch.from_numpy(dense)
    for row, target in zip(torch.split(rows, _PIECE), torch.split(classes, _PIECE), strict=True):
        means.add(of_rows[row], target)
    return means
