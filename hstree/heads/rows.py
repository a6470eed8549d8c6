"""What heads compute of rows [N, F]: in chunks, for some classes or without some, and draws. Here
``head`` is a :class:`hstree.heads.Head`, and ``hidden`` [N, F] its :meth:`encode`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hstree._checks import check_tensor, is_readable, mark_targets
from hstree._numerics import draw_columns, is_transformed, log_sum_exp
from hstree.ops import default_chunk_rows
from hstree.ops.target_log_softmax import log_softmax

ROUNDS = 8
"""So many times draws that are excluded are drawn again before all classes are scored."""


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
    size -= size % 16 if size > 16 else 0  # kernels of the CPU take whole vectors of rows
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def hooked(module: nn.Module, hidden: Tensor) -> Tensor:
    """What the forward pre-hooks of a module make of its input."""
    for key, hook in module._forward_pre_hooks.items():
        # FSDP undoes its own after forward, and register_fsdp_forward_method calls them.
        if (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            result = hook(module, (hidden,), {})
            result = result if result is None else result[0]
        else:
            result = hook(module, (hidden,))
        if result is not None:
            hidden = result[0] if isinstance(result, tuple) else result
    return hidden


def tempered(log_prob: Tensor, temperature: float) -> Tensor:
    """Logarithms [..., V] of p^(1 / temperature), normalized. Unless the temperature is 1,
    ``log_prob`` may be any scores whose softmax is p."""
    if temperature == 1.0:
        return log_prob
    # The rounding error of a large term that all classes share would grow with the quotient.
    most = log_prob.amax(-1, keepdim=True)
    return log_softmax((log_prob - most) / temperature)


# Some classes of each row


def gather_marked(log_prob: Tensor, classes: Tensor) -> Tensor:
    """Log-probabilities [N, K] of classes [N, K] from :func:`hstree.ops.mark_targets`, of those of
    all classes [N, V]."""
    n_classes = log_prob.shape[1]
    return mask_marked(log_prob.gather(1, classes.clamp(0, n_classes - 1)), classes, n_classes)


def mask_marked(log_prob: Tensor, classes: Tensor, n_classes: int) -> Tensor:
    """The log-probabilities with 0 for the mark -1 and NaN for V."""
    log_prob = log_prob.masked_fill(classes == -1, 0.0)
    return log_prob.masked_fill(classes == n_classes, torch.nan)


# All but some classes


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
        TypeError: if it is not a tensor.
        ValueError: for another shape or dtype; on a CPU, where values are read, for another value,
            and if fewer classes are left. Elsewhere such a value is none.
    """
    if exclude is None:
        return None
    check_tensor("exclude", exclude)
    if exclude.dtype != torch.int64:  # uint8 may be a mask
        raise ValueError(f"exclude: expected classes of dtype torch.int64, got {exclude.dtype}")
    marked = mark_targets(exclude, n_classes, -1, name="exclude")
    if exclude.ndim == 0 or (exclude.ndim > 1 and exclude.shape[:-1] != leading):
        each = f" or [{', '.join([*map(str, leading), 'K'])}]" if leading else ""
        raise ValueError(f"exclude: expected shape [K]{each}, got {list(exclude.shape)}")
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


def is_excluded(classes: Tensor, excluded: Tensor) -> Tensor:
    """Whether classes [N, n] are among those of :func:`check_exclude`."""
    excluded = excluded.expand(len(classes), -1).contiguous()
    place = torch.searchsorted(excluded, classes).clamp(max=excluded.shape[1] - 1)
    return excluded.gather(1, place) == classes


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


def log_prob_without(
    head: Any, hidden: Tensor, classes: Tensor, excluded: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probabilities [N, n] of classes [N, n] that are not excluded, normalized over those.

    Scores the classes and those excluded, and all classes of the rows whose excluded ones have more
    than half of the probability: 1 minus that would be rounded. Reads values.
    """
    excluded = excluded.expand(len(hidden), -1)
    some: Tensor = head.candidate_rows(hidden, torch.cat([classes, excluded], 1), temperature)
    log_prob, of_excluded = some[:, : classes.shape[1]], some[:, classes.shape[1] :]
    log_excluded = log_sum_exp(of_excluded.masked_fill(excluded < 0, -math.inf), 1)
    most = log_excluded > -math.log(2)
    rest = torch.log1p(-log_excluded.masked_fill(most, -math.inf).exp())
    if bool(most.any()):
        every = head.tempered_log_prob(hidden[most], temperature)
        of_others = log_sum_exp(mask_excluded(every, excluded[most]), 1)
        rest = rest.masked_scatter(most, of_others.to(rest.dtype))
    return log_prob - rest[:, None]


# The most probable classes, and draws, from all classes


def topk_without(log_prob: Tensor, k: int, excluded: Tensor) -> tuple[Tensor, Tensor]:
    """``without(log_prob, excluded).topk(k)``; also of scores."""
    log_prob = mask_excluded(log_prob, excluded)
    values, classes = log_prob.topk(k)
    return values - log_sum_exp(log_prob, 1).unsqueeze(1), classes


def topk_of_all(
    head: Any, columns: int, hidden: Tensor, k: int, excluded: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``topk_rows`` of a head in chunks of rows for which ``columns`` numbers are held. On a CPU
    the chunks are eight times as large as others: products of few rows read the whole weight from
    memory again."""
    columns = max(1, columns // 8) if hidden.device.type == "cpu" else columns
    parts: list[tuple[Tensor, Tensor]]
    if excluded is None:
        parts = [head.class_log_prob(x).topk(k, dim=-1) for (x,) in split_rows(columns, hidden)]
    else:
        chunks = split_rows(columns, hidden, excluded.expand(hidden.shape[0], -1))
        parts = [topk_without(head.class_log_prob(x), k, some) for x, some in chunks]
    values, classes = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(classes)


def sample_of_all(
    head: Any,
    hidden: Tensor,
    n: int,
    temperature: float,
    generator: torch.Generator | None,
    excluded: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``sample_rows`` of a head from the scores of all classes."""
    if not len(hidden):
        shape = (0, n)
        return hidden.new_empty(shape, dtype=torch.int64), hidden.new_empty(shape)
    log_prob = head.tempered_log_prob(hidden, temperature)
    if excluded is not None:
        log_prob = without(log_prob, excluded)
    classes = draw_columns(log_prob.exp(), n, generator)
    return classes, log_prob.gather(1, classes)


def sample_again(
    head: Any,
    hidden: Tensor,
    n: int,
    temperature: float,
    generator: torch.Generator | None,
    excluded: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """``sample_rows`` of a head that draws without the scores of all classes: draws that
    are excluded are drawn again and, after ``ROUNDS``, from all classes."""
    if torch.compiler.is_compiling() or is_transformed() or hidden.is_meta:  # no values
        return sample_of_all(head, hidden, n, temperature, generator, excluded)
    classes, _ = head.sample_rows(hidden, n, temperature, generator)
    again = is_excluded(classes, excluded)
    for _ in range(ROUNDS):
        row, draw = again.nonzero(as_tuple=True)
        if not len(row):
            return classes, None
        some, _ = head.sample_rows(hidden[row], 1, temperature, generator)
        classes[row, draw] = some.squeeze(1)
        again = is_excluded(classes, excluded)
    (rows,) = again.any(1).nonzero(as_tuple=True)
    excluded = excluded.expand(len(hidden), -1)[rows]
    some, _ = sample_of_all(head, hidden[rows], n, temperature, generator, excluded)
    classes[rows] = torch.where(again[rows], some, classes[rows])
    return classes, None
