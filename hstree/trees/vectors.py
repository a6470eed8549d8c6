"""Word vectors for clustered trees, from the training text alone."""

from __future__ import annotations

from contextlib import closing
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hstree._checks import check_int, check_int_array, check_seed, check_up_to
from hstree._progress import Task
from hstree.trees.tables import MAX_CLASSES

Context = Literal["left", "window", "both"]

_PIECE = 1 << 20
_DENSE_CLASSES = 300  # up to this many classes the SVD is dense


def count_classes(tokens: npt.ArrayLike, n_classes: int) -> npt.NDArray[np.int64]:
    """int64 [V], occurrences of each class among tokens [...] in [0, n_classes). Works in pieces,
    so that a memory map of any size needs little memory. Raises TypeError for tokens that are not
    integers, ValueError for one out of range."""
    ids = np.asarray(tokens).reshape(-1)
    if len(ids) and ids.dtype.kind not in "iu":
        raise TypeError(f"tokens: expected integers, got dtype {ids.dtype}")
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < n_classes:
        raise ValueError(
            f"tokens: expected ids in [0, {n_classes}), got [{ids.min()}, {ids.max()}]"
        )
    counts = np.zeros(n_classes, np.int64)
    for start in range(0, len(ids), _PIECE):
        piece = ids[start : start + _PIECE].astype(np.int64)
        counts += np.bincount(piece, minlength=n_classes)
    return counts


def word_vectors(
    tokens: npt.ArrayLike,
    n_classes: int,
    *,
    context: Context = "left",
    window: int = 2,
    n_features: int = 100,
    alpha: float = 1.0,
    frequency_power: float = 0.0,
    singular_power: float = 1.0,
    normalize: bool = True,
    seed: int = 0,
) -> npt.NDArray[np.float32]:
    r"""Vectors of the classes of a text: PPMI with neighboring classes, then a truncated SVD.

    n(w, c) is the number of times that class w has class c as its neighbor::

        A[w, c] = max(0, log(p(w, c) / (p(w) q(c)))),  q(c) proportional to (sum_w n(w, c))^alpha
        diag(f)^frequency_power A = U S V',            truncated to the largest singular values
        x[w] = A[w] V (S / S_1)^(singular_power - 1),  divided by its length if ``normalize``

    With ``frequency_power`` 0 this is x = U S^singular_power up to a factor. With 1/2 the axes fit
    frequent classes best; the length of a vector still does not depend on its frequency.

    Args:
        tokens: classes of the text in order, int [n], n >= 1.
        n_classes: number of classes, V >= 1.
        context: ``"left"``: c directly precedes w. ``"both"``: c directly precedes or follows w, in
            separate columns. ``"window"``: c is at most ``window`` positions before or after w.
        window: number of positions on either side, for ``"window"``.
        n_features: number of features, F, at least 1; values above V are reduced to V.
        alpha: smoothing of the context frequencies, in [0, 1]; 1: none.
        frequency_power: weight of frequent classes in the SVD, in [0, 1].
        singular_power: weight of large singular values, in [0, 2].
        normalize: whether all vectors have length 1.
        seed: seed of the start vector of the iterative SVD.

    Returns:
        The vectors, float32 [V, min(F, V)]. Classes without association, such as those that never
        occur, have zero vectors. The largest entry of each axis is positive. Every call on one
        machine gives the same vectors; between linear-algebra libraries the last bits may differ.

    Raises:
        TypeError: if the tokens are not integers.
        ValueError: for an empty text, a token outside 0 .. V - 1, or an option out of range.

    Example:
        >>> import hstree
        >>> vectors = hstree.trees.word_vectors([0, 1, 2, 3, 0, 2, 1, 3], 4, n_features=2)
        >>> vectors.shape
        (4, 2)

    Source: Levy, Goldberg and Dagan, Improving distributional similarity with lessons learned from
    word embeddings, TACL 2015.
    """
    import scipy.sparse  # not at the top: its import takes longer than the rest of hstree

    n_classes = check_int("n_classes", n_classes, 1, MAX_CLASSES)
    ids = check_int_array("tokens", tokens, np.int64)
    if len(ids) == 0:
        raise ValueError("tokens: expected at least one token, got none")
    outside = (ids < 0) | (ids >= n_classes)
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(f"tokens[{i}]: expected a class from 0 to {n_classes - 1}, got {ids[i]}")
    if context not in get_args(Context):
        raise ValueError(f"context: expected one of {list(get_args(Context))}, got {context!r}")
    window = check_int("window", window, 1)
    rank = min(check_int("n_features", n_features, 1), n_classes)
    alpha = check_up_to("alpha", alpha, 1)
    frequency_power = check_up_to("frequency_power", frequency_power, 1)
    singular_power = check_up_to("singular_power", singular_power, 2)
    seed = check_seed(seed)

    if context == "window":
        preceding = _neighbours(ids, n_classes, min(window, len(ids) - 1))
        association = _ppmi(preceding + preceding.T, alpha)
    else:
        preceding = _neighbours(ids, n_classes, min(1, len(ids) - 1))
        association = _ppmi(preceding, alpha)
        if context == "both":
            following = _ppmi(preceding.T, alpha)
            association = scipy.sparse.hstack([association, following], format="csr")

    vectors = np.zeros((n_classes, rank))
    if association.nnz:
        weight = np.bincount(ids, minlength=n_classes).astype(np.float64) ** frequency_power
        weighted = scipy.sparse.diags_array(weight) @ association
        with closing(Task("learning word vectors", 1)):
            singular, axes = right_singular_vectors(weighted, rank, seed)
        # The product below has the singular values once. Weights of frequent classes only choose
        # the axes.
        scale = (singular / singular[0]) ** (singular_power - 1)
        vectors[:, : len(singular)] = (association @ axes.T) * scale
    if normalize:
        length = np.linalg.norm(vectors, axis=1, keepdims=True)
        # Vectors that are only rounding errors become zero.
        vectors = np.where(length > 1e-9 * length.max(initial=0), vectors, 0)
        vectors /= np.where(length > 0, length, 1)
    return vectors.astype(np.float32)


def _neighbours(ids: npt.NDArray[np.int64], n_classes: int, window: int) -> Any:
    """Sparse [V, V]: how often class w (row) is 1 to ``window`` positions after c (column)."""
    import scipy.sparse

    pairs = [
        # A pair of classes is one number, so that equal pairs are counted by sorting.
        np.unique(ids[d:] * n_classes + ids[:-d], return_counts=True)
        for d in range(1, window + 1)
    ]
    total = scipy.sparse.csr_array((n_classes, n_classes), dtype=np.float64)
    for pair, count in pairs:
        entries = (count.astype(np.float64), (pair // n_classes, pair % n_classes))
        total = total + scipy.sparse.csr_array(entries, shape=total.shape)
    return total


def _ppmi(counts: Any, alpha: float) -> Any:
    """Positive pointwise mutual information of sparse counts; columns smoothed by ``alpha``."""
    import scipy.sparse

    pairs = counts.tocoo()
    row = np.asarray(counts.sum(axis=1)).ravel()
    column = np.asarray(counts.sum(axis=0)).ravel()
    column[column > 0] **= alpha
    word, context = pairs.coords
    value = np.log(pairs.data * column.sum() / (row[word] * column[context]))
    keep = value > 0
    return scipy.sparse.csr_array(
        (value[keep], (word[keep], context[keep])), shape=counts.shape, dtype=np.float64
    )


def right_singular_vectors(
    matrix: Any, rank: int, seed: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """At most ``rank`` positive singular values, descending, and their right vectors as rows, of an
    array or a sparse matrix of scipy."""
    import scipy.sparse.linalg

    limit = min(matrix.shape)
    if limit <= _DENSE_CLASSES or rank >= limit:
        dense = matrix.toarray() if scipy.sparse.issparse(matrix) else matrix
        _, singular, axes = np.linalg.svd(dense, full_matrices=False)
    else:
        # Otherwise the iteration would begin with a vector that differs from call to call.
        start = np.random.default_rng(seed).standard_normal(limit)
        _, singular, axes = scipy.sparse.linalg.svds(matrix, k=rank, v0=start)
        singular, axes = singular[::-1], axes[::-1]
    keep = min(rank, int(np.count_nonzero(singular > 1e-10 * singular[0])))
    singular, axes = singular[:keep], axes[:keep]
    # The sign of an axis is free: its largest entry becomes positive.
    largest = np.abs(axes).argmax(axis=1)
    return singular, axes * np.sign(axes[np.arange(keep), largest])[:, None]
