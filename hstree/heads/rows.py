"""Log-probabilities of rows: in chunks, of a temperature, without the classes to leave out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hstree._checks import mark_targets
from hstree._numerics import is_readable, is_transformed, log_sum_exp
from hstree.ops import default_chunk_rows
from hstree.ops.target_log_softmax import log_softmax


def in_row_chunks(function: Callable[..., Tensor], columns: int, *tensors: Tensor) -> Tensor:
    """``function(*tensors)`` [N] of tensors [N, ...], in chunks of rows with ``columns`` numbers in
    each row. The backward pass computes each chunk again. Not chunked under torch.func, which has
    no checkpoints, and in an exported program."""
    if is_transformed() or torch.compiler.is_exporting():
        return function(*tensors)
    chunks = split_rows(columns, *tensors)
    return torch.cat([checkpoint(function, *chunk, use_reentrant=False) for chunk in chunks])


def split_rows(columns: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Chunks of the rows of tensors [N, ...], for ``columns`` numbers in each row. One chunk in an
    exported program, which must take any number of rows."""
    if torch.compiler.is_exporting():
        return [tensors]
    size = default_chunk_rows(tensors[0], columns)
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def mask_candidates(log_prob: Tensor, candidates: Tensor, n_classes: int) -> Tensor:
    """The log-probabilities with 0 for candidates -1 and NaN for V."""
    log_prob = log_prob.masked_fill(candidates == -1, 0.0)
    return log_prob.masked_fill(candidates == n_classes, torch.nan)


def tempered(log_prob: Tensor, temperature: float) -> Tensor:
    """Logarithms [..., V] of p^(1 / temperature), normalized. Unless the temperature is 1,
    ``log_prob`` may be any scores whose softmax is p."""
    if temperature == 1.0:
        return log_prob
    # The rounding error of a large term that all classes share would grow with the quotient.
    most = log_prob.amax(-1, keepdim=True)
    return log_softmax((log_prob - most) / temperature)


def check_exclude(
    exclude: Tensor | None, leading: torch.Size, n_classes: int, least: int
) -> Tensor | None:
    """The classes that each of N rows leaves out, int64 [N, K], or [1, K] for all rows: increasing,
    each once, after -1 for none. None if there are none.

    Args:
        exclude: classes for all rows [K], or [..., K] padded with -1.
        leading: leading dimensions of the hidden vectors, [...].
        n_classes: number of classes, V.
        least: number of classes that must be left in each row.

    Raises:
        TypeError: if it is no tensor.
        ValueError: for another shape or dtype; on a CPU, where values are read, for another value,
            and if fewer classes are left. Elsewhere such a value is none.
    """
    if exclude is None:
        return None
    marked = mark_targets(exclude, n_classes, -1, name="exclude")
    if exclude.ndim == 0 or (exclude.ndim > 1 and exclude.shape[:-1] != leading):
        each = f" or {[*leading, 'K']}" if leading else ""
        raise ValueError(f"exclude: expected shape ['K']{each}, got {list(exclude.shape)}")
    size = exclude.shape[-1]
    if not size:
        return None
    classes = marked.masked_fill(marked == n_classes, -1).reshape(-1, size).sort(1).values
    repeated = classes.diff(dim=1) == 0
    classes[:, 1:].masked_fill_(repeated, -1)
    classes = classes.sort(1).values
    if size > n_classes - least and is_readable(classes) and len(classes):
        left = n_classes - int((classes >= 0).sum(1).max())
        if left < least:
            raise ValueError(
                f"exclude: expected at least {least} of the {n_classes} classes to be left in "
                f"every row, got {left}"
            )
    return classes


def mask_excluded(scores: Tensor, excluded: Tensor) -> Tensor:
    """Scores [N, V] with -inf for the classes of :func:`check_exclude`."""
    # Not len(), which would fix the number of rows of an exported program.
    rows, n_classes = excluded.shape[0], scores.shape[1]
    mask = torch.zeros(rows, n_classes + 1, dtype=torch.bool, device=scores.device)
    # The remainder of -1 is V, a column more.
    mask = mask.scatter(1, excluded.remainder(n_classes + 1), True)
    return scores.masked_fill(mask[:, :n_classes], -math.inf)


def without(log_prob: Tensor, excluded: Tensor) -> Tensor:
    """:func:`mask_excluded` of log-probabilities, normalized over the other classes."""
    log_prob = mask_excluded(log_prob, excluded)
    return log_prob - log_sum_exp(log_prob, 1).unsqueeze(1)


def topk_without(log_prob: Tensor, k: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """``without(log_prob, excluded).topk(k)``; also of scores."""
    log_prob = mask_excluded(log_prob, excluded)
    values, classes = log_prob.topk(k)
    return values - log_sum_exp(log_prob, 1).unsqueeze(1), classes


def is_excluded(classes: Tensor, excluded: Tensor) -> Tensor:
    """Whether classes [N, n] are among those of :func:`check_exclude`."""
    excluded = excluded.expand(len(classes), -1).contiguous()
    place = torch.searchsorted(excluded, classes).clamp(max=excluded.shape[1] - 1)
    return excluded.gather(1, place) == classes
