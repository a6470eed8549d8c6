"""The labels of a data set in which a row has several, and class vectors from its features."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.trees.vectors import right_singular_vectors

MOST_FEATURES = 128
_ROWS = 8192  # rows that are summed at a time, in float64
_RIDGE = 1e-6  # relative to the mean square of the features
_SHRINKAGE = 8.0  # rows
_AS_MATRIX = "a 0/1 matrix [N, V] is given as scipy.sparse.csr_array(labels)"


def label_pairs(labels: Any, n_classes: int) -> tuple[Tensor, Tensor, int]:
    """Row and class int64 [P] of each label, by rows, and the number of rows.

    Args:
        labels: classes, integers [N] or [N, K], negative where a row has fewer than K labels; or a
            sparse matrix of scipy [N, V] with an entry for each label.

    Raises:
        ValueError: for anything else, such as a 0/1 matrix, or a class out of range.
    """
    if hasattr(labels, "tocsr"):
        if labels.shape[1:] != (n_classes,):
            raise ValueError(
                f"labels: expected a sparse matrix with {n_classes} columns, got {labels.shape}"
            )
        return _entries(labels)
    given = _table(labels)
    if given.numel() and int(given.max()) >= n_classes:
        raise ValueError(f"labels: expected classes below {n_classes}, got {int(given.max())}")
    # As classes, V > 1 columns would repeat some, or give every class to every row.
    if given.shape[1] == n_classes > 1 and len(given) and torch.equal(given, given.clamp(0, 1)):
        raise ValueError(
            "labels: expected classes, integers [N] or [N, K], got a matrix of 0 and 1, of shape "
            f"{list(given.shape)}; {_AS_MATRIX}"
        )
    rows, column = (given >= 0).nonzero(as_tuple=True)
    return rows, given[rows, column], len(given)


def _entries(matrix: Any) -> tuple[Tensor, Tensor, int]:
    """Row and column of the entries of a sparse matrix of scipy that are not zero, by rows."""
    entries = matrix.tocsr(copy=True)
    entries.sum_duplicates()
    entries.eliminate_zeros()
    n_rows = entries.shape[0]
    rows = np.repeat(np.arange(n_rows), np.diff(entries.indptr))
    return torch.from_numpy(rows), torch.from_numpy(entries.indices.astype(np.int64)), n_rows


def _table(labels: Any) -> Tensor:
    """Classes that are given as a table, int64 [N, K]."""
    if isinstance(labels, Tensor) and labels.layout != torch.strided:
        raise ValueError(
            f"labels: expected a sparse matrix of scipy, got a tensor of layout {labels.layout}; "
            "with x = labels.to_sparse_coo().coalesce() it is "
            "scipy.sparse.coo_array((x.values(), x.indices()), tuple(x.shape))"
        )
    try:
        given = torch.as_tensor(labels).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            "labels: expected rows of K classes, with -1 where a row has fewer, as "
            "torch.nn.utils.rnn.pad_sequence(rows, True, -1) makes of one tensor a row, got "
            f"{type(labels).__name__}: {error}"
        ) from None
    is_class = not (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool)
    if not is_class or given.ndim not in (1, 2):
        raise ValueError(
            f"labels: expected classes, integers [N] or [N, K], got {given.dtype} of shape "
            f"{list(given.shape)}; {_AS_MATRIX}"
        )
    return given.long() if given.ndim == 2 else given.long()[:, None]


def padded_labels(matrix: Any) -> Tensor:
    """The classes of each row of a 0/1 matrix as a table, for the loss over all labels of a row.

    Args:
        matrix: sparse matrix of scipy [N, V] with an entry for each label.

    Returns:
        Classes int64 [N, K], increasing, where K is the largest number of labels of a row; -1
        behind those of a row that has fewer.

    Raises:
        TypeError: if it is not a sparse matrix of scipy.

    Example:
        >>> import hstree, torch
        >>> from scipy.sparse import csr_array
        >>> target = hstree.trees.padded_labels(csr_array([[0, 1, 0, 1], [1, 0, 0, 0]]))
        >>> target
        tensor([[ 1,  3],
                [ 0, -1]])
        >>> head, hidden = hstree.Softmax(8, 4, ignore_index=-1), torch.randn(2, 8)
        >>> loss = head(hidden.repeat_interleave(target.shape[1], 0), target.flatten()).loss
    """
    if not hasattr(matrix, "tocsr"):
        raise TypeError(
            f"matrix: expected a sparse matrix of scipy, got {type(matrix).__name__}; "
            "scipy.sparse.csr_array makes one of an array"
        )
    rows, classes, n_rows = _entries(matrix)
    count = torch.bincount(rows, minlength=n_rows)
    # Place of each label in its row: the entries are ordered by rows.
    place = torch.arange(len(rows)) - (count.cumsum(0) - count)[rows]
    table = torch.full((n_rows, int(count.max()) if n_rows else 0), -1)
    table[rows, place] = classes
    return table


def label_means(
    features: Any, labels: Any, n_classes: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    r"""Vectors of the labels, for clustered trees: the mean features of the rows of each label,
    shrunk and whitened within labels.

    .. math::
        \hat\mu_y = \frac{s_y + \kappa m}{n_y + \kappa}, \qquad
        x_y = L^{-1} (\hat\mu_y - m), \qquad
        L L^T = W + \epsilon I, \qquad
        W = \frac{1}{n} \sum_i h_i h_i^T - \sum_y \frac{n_y}{n} \mu_y \mu_y^T

    over the n pairs of a row with features :math:`h_i` and one of its labels, with the sum
    :math:`s_y` and the mean :math:`\mu_y` of the :math:`n_y` pairs of a label, the mean :math:`m`
    of all, :math:`\kappa` = 8, and :math:`\epsilon` = 1e-6 times the mean square of the features.
    An invertible linear map of the features only rotates the vectors, up to rounding and
    :math:`\epsilon`. More than 128 features are first projected on their 128 largest singular
    vectors. The sums are in float64.

    Args:
        features: what describes the rows, real [N, F]: a tensor, an array or a sparse matrix of
            scipy.
        labels: classes, integers [N] or [N, K], negative where a row has fewer than K labels; or a
            sparse matrix of scipy [N, V] with an entry for each label.
        n_classes: number of classes, V.
        seed: seed of the start vector of the iterative decomposition.

    Returns:
        The vectors, float32 [V, F], zero for labels without a row, and the number of rows of each
        label, int64 [V], on the CPU.

    Raises:
        ValueError: for another shape, no label, a class out of range, or features that are all zero
            or not finite.

    Example:
        >>> import torch, hstree
        >>> features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> vectors, counts = hstree.trees.label_means(features, [[0, 1], [0, -1], [2, -1]], 3)
        >>> vectors.shape, counts.tolist()
        (torch.Size([3, 2]), [2, 1, 1])

    Source: the mean features of labels, Prabhu et al., Parabel: Partitioned label trees for extreme
    classification, WWW 2018.
    """
    rows, classes, n_rows = label_pairs(labels, n_classes)
    if isinstance(features, Tensor):
        features = features.detach().cpu().numpy()
    if not hasattr(features, "tocsr"):
        features = np.asarray(features)
    if len(features.shape) != 2:
        raise ValueError(f"features: expected shape [N, F], got {list(features.shape)}")
    if n_rows != features.shape[0]:
        raise ValueError(
            f"labels: expected {features.shape[0]} rows, as many as features, got {n_rows}"
        )
    if not len(rows):
        raise ValueError("labels: expected at least one label, got none")
    if features.shape[1] > MOST_FEATURES:
        _, axes = right_singular_vectors(features, MOST_FEATURES, seed)
        features = features @ axes.T
    elif hasattr(features, "toarray"):
        features = features.toarray()
    dense: npt.NDArray[np.float32] = np.asarray(features, np.float32)
    of_rows = torch.from_numpy(dense)
    count = torch.bincount(classes, minlength=n_classes)
    total = torch.zeros(n_classes, dense.shape[1], dtype=torch.float64)
    second = torch.zeros(dense.shape[1], dense.shape[1], dtype=torch.float64)
    for row, target in zip(torch.split(rows, _ROWS), torch.split(classes, _ROWS), strict=True):
        values = of_rows[row].double()
        total.index_add_(0, target, values)
        second.addmm_(values.T, values)
    return _whitened(count.double()[:, None], total, second), count


def _whitened(count: Tensor, total: Tensor, second: Tensor) -> Tensor:
    """The vectors of :func:`label_means`: n_y [V, 1], s_y [V, F], the sum of h_i h_i^T [F, F]."""
    n = count.sum()
    mean, scale = total.sum(0) / n, float(second.trace() / (n * total.shape[1]))
    if not 0 < scale < math.inf:
        raise ValueError(f"features: expected a finite positive mean square, got {scale}")
    # The second moment of all rows less that of the means of the labels.
    within = (second - (total / count.clamp(min=1)).T @ total) / n
    within.diagonal().add_(_RIDGE * scale)
    shrunk = (total - count * mean) / (count + _SHRINKAGE)  # of a label without rows: 0
    factor = torch.linalg.cholesky(within)
    vectors: Tensor = torch.linalg.solve_triangular(factor, shrunk.T, upper=False).T
    return vectors.float().contiguous()
