"""Log-probabilities of a mixture of softmaxes that add vectors of clusters to one output embedding:
``torch.ops.hstree.forest_log_prob``, in chunks of rows, written in Python with
``torch.ops.hstree.forest_gradient_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import (
    autocasts,
    blocks,
    is_cast,
    is_transformed,
    linear_scores,
    log_add_exp,
    sum_dtype,
    without_ignored,
)
from hstree.ops import _kernels
from hstree.ops._chunked_loss import (
    ChunkedLoss,
    add_offset,
    aligned,
    check_decoder,
    check_offset,
    gradient_dtype,
    group_chunks,
    keeps_low,
    rounded_weight,
    write_product,
)
from hstree.ops._gradient import register_no_gradient
from hstree.ops._recycled import recycled
from hstree.ops.mixture_log_prob import default_chunk_rows
from hstree.ops.target_log_softmax import log_softmax


def forest_log_prob(
    hidden: Tensor,
    log_prior: Tensor,
    cluster_score: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cluster: Tensor,
    target: Tensor,
    *,
    offset: Tensor | None = None,
    row_weight: Tensor | None = None,
    reduction: str = "mean",
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Log-probability of each target under a mixture of softmaxes over one output embedding, each
    with scores of its own clusters, and the loss.

    .. math::
        \log p_n = \log \sum_t \pi_{nt}\,
        \mathrm{softmax}_v(W_v \cdot h_n + b_v + r_{nt}[c_t(v)])_{y_n}

    Equivalent to, for targets in [0, V) and a mean::

        score = F.linear(hidden, weight, bias).float()                           # [N, V]
        each = [score + r[:, c] for r, c in zip(cluster_score.unbind(1), cluster.long().unbind(1))]
        log_prob = (log_prior[:, :, None] + torch.stack(each, 1).log_softmax(2)).logsumexp(1)
        log_prob = log_prob.gather(1, target[:, None]).squeeze(1)
        loss = -(row_weight * log_prob).sum() / row_weight.sum()

    The exponentials factor: on the CPU a tree costs V additions and C exponentials, on CUDA V
    exponentials in registers, and no second product with W. Neither N V nor T V numbers of a row
    are held. Deterministic.

    Args:
        hidden: context vectors, h [N, D].
        log_prior: log-priors of the trees, log pi [N, T].
        cluster_score: scores of the clusters, r [N, T, C].
        weight: class vectors, W [V, D], dtype of ``hidden``, or float32 for a ``hidden`` of 16
            bits; see :func:`mixture_log_prob`.
        bias: class biases, b [V], or None.
        cluster: cluster of each class in each tree, c [V, T] int32, in [0, C).
        target: classes, [N] int64 in [0, V), or -1 for a log-probability of 0 without gradient.
        offset: number added to the score of each class, [V], but not to that of a row's target, as
            in :func:`mixture_log_prob`. None: all 0.
        row_weight: factor of each row in the loss, [N], without gradient; the mean divides by the
            sum of the factors. None: all 1.
        reduction: ``"none"``, ``"sum"`` or ``"mean"``.
        chunk_rows: number of rows whose V scores are held at a time; None: 128 to 256 on a CPU, and
            on a GPU as in :func:`mixture_log_prob`, up to a multiple of 64.

    Returns:
        log_prob [N] and the reduced loss, in the dtype of sums: float32, or float64 for float64. A
        gradient through the loss needs no further product unless ``reduction`` is ``"none"``. A
        gradient through log_prob computes the scores again.

    Raises:
        ValueError: for a wrong shape, dtype or reduction, or ``chunk_rows`` below 1.
        RuntimeError: on the CPU, for a target or cluster out of range; for a second derivative.
            On CUDA a target out of range makes its row NaN.

    Example:
        >>> import torch
        >>> from hstree.ops import forest_log_prob
        >>> prior, score = torch.full((2, 2), 0.5).log(), torch.zeros(2, 2, 2)
        >>> cluster = torch.tensor([[0, 1], [0, 0], [1, 1], [1, 0]], dtype=torch.int32)
        >>> hidden, weight, target = torch.zeros(2, 8), torch.randn(4, 8), torch.tensor([3, -1])
        >>> forest_log_prob(hidden, prior, score, weight, None, cluster, target)
        (tensor([-1.3863,  0.0000]), tensor(1.3863))
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction: expected one of none, sum, mean, got {reduction!r}")
    if autocasts(hidden.device) and hidden.dtype != torch.float64:
        low = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(low), weight if weight.dtype == torch.float32 else weight.to(low)
    _check(hidden, log_prior, cluster_score, weight, bias, cluster, target, offset, row_weight)
    if chunk_rows is None:
        chunk_rows = default_chunk_rows(hidden, weight.shape[0])
        if hidden.is_cuda:
            # A multiple of 64, so that the rows of every class are aligned, for the products too.
            least = 256 if keeps_low(hidden) else hidden.shape[1] // 2
            chunk_rows = max(chunk_rows, least) // 64 * 64 or 64
        else:  # whole vectors of rows; more of them would leave the cache
            chunk_rows = min(max(chunk_rows // 64 * 64, 128), 256)
    elif chunk_rows < 1:
        raise ValueError(f"chunk_rows: expected at least 1, got {chunk_rows}")
    sums = sum_dtype(hidden.dtype)
    log_prior, cluster_score = log_prior.to(sums), cluster_score.to(sums)
    bias = None if bias is None else bias.to(sums)
    offset = None if offset is None else offset.detach().to(sums)
    problem = Problem(
        hidden, log_prior, cluster_score, weight, bias, cluster, target, offset, chunk_rows
    )
    return LOSS(problem, row_weight, reduction)


def _check(
    hidden: Tensor,
    log_prior: Tensor,
    cluster_score: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cluster: Tensor,
    target: Tensor,
    offset: Tensor | None,
    row_weight: Tensor | None,
) -> None:
    if hidden.dim() != 2:
        raise ValueError(f"hidden: expected shape [N, D], got {tuple(hidden.shape)}")
    check_decoder("hidden", hidden, weight, bias, target, row_weight)
    check_offset(offset, weight)
    rows, shape = hidden.shape[0], tuple(cluster_score.shape)
    if cluster_score.dim() != 3 or shape[0] != rows or not shape[1] or not shape[2]:
        raise ValueError(
            f"cluster_score: expected shape [{rows}, T, C] with T and C of at least 1, got {shape}"
        )
    if log_prior.shape != shape[:2]:
        raise ValueError(
            f"log_prior: expected shape {list(shape[:2])}, got {tuple(log_prior.shape)}"
        )
    if cluster.shape != (weight.shape[0], shape[1]) or cluster.dtype != torch.int32:
        raise ValueError(
            f"cluster: expected shape [{weight.shape[0]}, {shape[1]}] and dtype torch.int32, "
            f"got {tuple(cluster.shape)} and {cluster.dtype}"
        )


class Problem(NamedTuple):
    """The common arguments of the op and its backward op, in order. The first five have
    gradients."""

    hidden: Tensor  # [N, D]
    log_prior: Tensor  # [N, T]
    cluster_score: Tensor  # [N, T, C]
    weight: Tensor  # [V, D], of the dtype of hidden or in float32
    bias: Tensor | None  # [V]
    cluster: Tensor  # [V, T]
    target: Tensor  # [N], -1 for an ignored row
    offset: Tensor | None  # [V], added to the scores of classes other than the target
    chunk_rows: int


def _empty_gradients(problem: Problem, wanted: Sequence[bool]) -> list[Tensor]:
    """Uninitialized gradients; unwanted ones have no elements. A class or a cluster has its rows
    side by side, as in the chunks."""
    hidden, log_prior, cluster_score, weight, *_ = problem
    shapes = (
        hidden.shape,
        log_prior.shape[::-1],
        (*cluster_score.shape[1:], hidden.shape[0]),
        weight.shape,
        weight.shape[:1],
    )
    dtypes = [sum_dtype(hidden.dtype)] * len(shapes)
    dtypes[3] = gradient_dtype(weight)
    gradients = [
        hidden.new_empty(shape if want else (0,), dtype=dtype)
        for want, shape, dtype in zip(wanted, shapes, dtypes, strict=True)
    ]
    if wanted[1]:
        gradients[1] = gradients[1].t()
    if wanted[2]:
        gradients[2] = gradients[2].permute(2, 0, 1)
    return gradients


def _write_scores(out: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write the scores [V, R] of hidden [R, D]."""
    bias = None if bias is None else bias[:, None]
    if not is_cast(weight):
        write_product(out, weight, hidden.t(), bias)
        return
    columns, begin = hidden.to(out.dtype).t(), 0
    for block in blocks(weight):
        write_product(out[begin : begin + len(block)], block, columns)
        begin += len(block)
    if bias is not None:
        out += bias


def by_cluster(cluster: Tensor, clusters: int) -> tuple[Tensor, Tensor]:
    """The classes of each tree by their clusters [T, V], and the first place of each cluster and
    the end of the last [T, C + 1]; classes in clusters out of range are in none."""
    key, order = cluster.t().contiguous().sort(dim=1, stable=True)
    first = torch.arange(clusters + 1, dtype=torch.int32, device=cluster.device)
    return order, torch.searchsorted(key, first.repeat(len(key), 1))


def _run(
    problem: Problem, wanted: Sequence[bool], upstream: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """log_prob [N], and the wanted gradients for ``upstream`` [N], the gradient of log_prob."""
    hidden, log_prior, cluster_score, weight, bias, cluster, target, offset, chunk_rows = problem
    rows, classes = len(hidden), weight.shape[0]
    hidden = without_ignored(hidden, target == -1)
    if keeps_low(hidden) and rows != aligned(rows):
        return _run_aligned(problem, wanted, upstream)
    weight = rounded_weight(weight, hidden)
    gradients = _empty_gradients(problem, [want and i != 3 for i, want in enumerate(wanted)])
    grad_hidden, grad_log_prior, grad_cluster_score, _, grad_bias = (
        gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)
    )
    if grad_bias is not None:
        grad_bias.zero_()
    log_prob = hidden.new_empty(rows, dtype=sum_dtype(hidden.dtype))
    # 16-bit gradients of the scores of a group of chunks, which the kernels write and add the bias.
    low, group, fused = None, chunk_rows, keeps_low(weight) and weight.is_cuda
    if keeps_low(weight) and any(wanted):
        chunks = group_chunks(problem.weight, chunk_rows) if wanted[3] else 1
        group = min(chunks * chunk_rows, max(rows, 1))
        low = weight.new_empty(classes, group)
    grad_weight = None
    if wanted[3]:
        sums = log_prob.dtype if group < rows else gradient_dtype(problem.weight)
        grad_weight = log_prob.new_empty(weight.shape, dtype=sums)
        if not rows:
            grad_weight.zero_()
    buffer = log_prob.new_empty(min(chunk_rows, rows) * classes)
    order = boundary = None
    if _kernels.of_cuda(hidden):
        order, boundary = by_cluster(cluster, cluster_score.shape[2])
    for begin in range(0, rows, chunk_rows):
        chunk = slice(begin, begin + chunk_rows)
        part, end = hidden[chunk], min(begin + chunk_rows, rows)
        # A class has its rows side by side: the score of its cluster is added vector by vector.
        scores = buffer[: classes * len(part)].view(classes, len(part))
        _write_scores(scores, part, weight, None if fused else bias)
        if offset is not None:
            add_offset(scores, offset, target[chunk], 0)
        of_clusters = cluster_score[chunk].permute(1, 2, 0)
        # A copy, because it is overwritten by its gradient, as the scores are.
        of_clusters = of_clusters.clone(memory_format=torch.contiguous_format)
        first = begin // group * group
        of_group = scores if low is None else low[:, : end - first]
        kept = of_group[:, begin - first :] if low is not None else scores
        log_prob[chunk], by_log_prior = torch.ops.hstree.forest_gradient_(
            scores,
            of_clusters,
            log_prior[chunk].t(),
            cluster,
            target[chunk],
            order,
            boundary,
            upstream[chunk] if any(wanted) else None,
            bias if fused else None,
            kept if fused and low is not None else None,
        )
        if not any(wanted):
            continue
        if low is None:
            of_group = kept = scores.to(hidden.dtype)
        elif not fused:
            kept.copy_(scores)
        if grad_log_prior is not None:
            grad_log_prior[chunk] = by_log_prior.t()
        if grad_cluster_score is not None:
            grad_cluster_score[chunk] = of_clusters.permute(2, 0, 1)
        if grad_hidden is not None:
            write_product(grad_hidden[chunk], kept.t(), weight)
        if end % group and end < rows:
            continue
        if grad_bias is not None:
            of_classes = scores if low is None else of_group
            grad_bias += of_classes.sum(1, dtype=grad_bias.dtype)
        if grad_weight is not None:
            write_product(grad_weight, of_group, hidden[first:end], grad_weight if first else None)
    if grad_weight is not None:
        gradients[3] = grad_weight.to(gradient_dtype(problem.weight))
    return log_prob, gradients


def _run_aligned(
    problem: Problem, wanted: Sequence[bool], upstream: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """:func:`_run` with ignored rows up to a number of rows that products are fast with."""
    rows = len(problem.hidden)
    missing = aligned(rows) - rows
    padded = problem._replace(
        hidden=F.pad(problem.hidden, (0, 0, 0, missing)),
        log_prior=F.pad(problem.log_prior, (0, 0, 0, missing)),
        cluster_score=F.pad(problem.cluster_score, (0, 0, 0, 0, 0, missing)),
        target=F.pad(problem.target, (0, missing), value=-1),
    )
    log_prob, found = _run(padded, wanted, F.pad(upstream, (0, missing)))
    gradients = _empty_gradients(problem, [want and i < 3 for i, want in enumerate(wanted)])
    for i, want in enumerate(wanted):
        if want and i < 3:
            gradients[i].copy_(found[i][:rows])
        elif want:
            gradients[i] = found[i]
    return log_prob[:rows].clone(), gradients


def forest_log_softmax(
    hidden: Tensor,
    log_prior: Tensor,
    cluster_score: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cluster: Tensor,
) -> Tensor:
    """Log-probabilities [N, V] of all classes; the arguments as in :func:`forest_log_prob`.

    On a CPU without gradients, ``torch.ops.hstree.forest_log_softmax``: with the exponentials
    factored, all trees cost two passes over the scores. Elsewhere torch's own operators, which
    take five passes for each tree.
    """
    given = (hidden, log_prior, cluster_score, weight, bias)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    composed = recorded or is_transformed() or torch.compiler.is_compiling()
    if hidden.device.type == "cpu" and not composed:
        if autocasts(hidden.device) and torch.float64 not in (hidden.dtype, weight.dtype):
            low = torch.get_autocast_dtype("cpu")
            hidden, weight = hidden.to(low), weight.to(low)
        sums = sum_dtype(hidden.dtype)
        score = recycled(hidden, len(weight), len(hidden), dtype=sums)
        _write_scores(score, hidden, weight, None if bias is None else bias.to(sums))
        of_clusters = cluster_score.to(sums).permute(1, 2, 0).contiguous()
        log_prob: Tensor = torch.ops.hstree.forest_log_softmax(
            score, of_clusters, log_prior.to(sums).t(), cluster
        )
        return log_prob
    score, total = linear_scores(hidden, weight, bias), None
    # One tree after another: all at once would take [N, T, V].
    for t, index in enumerate(cluster.long().unbind(1)):
        of_tree = log_softmax(score + cluster_score[:, t].index_select(1, index))
        of_tree = of_tree + log_prior[:, t : t + 1]
        total = of_tree if total is None else log_add_exp(total, of_tree)
    assert total is not None
    return total


def _gradient_fake(
    score: Tensor,
    cluster_score: Tensor,
    log_prior: Tensor,
    cluster: Tensor,
    target: Tensor,
    order: Tensor | None,
    boundary: Tensor | None,
    grad_log_prob: Tensor | None,
    *_: Tensor | None,
) -> tuple[Tensor, Tensor]:
    trees = 0 if grad_log_prob is None else len(log_prior)
    return score.new_empty(score.shape[1:]), score.new_empty((trees, score.shape[1]))


torch.library.register_fake("hstree::forest_gradient_", _gradient_fake)
torch.library.register_fake(
    "hstree::forest_log_softmax", lambda score, *_: score.new_empty(score.shape[::-1])
)
register_no_gradient("forest_log_softmax", "ForestSoftmax.log_prob")
LOSS = ChunkedLoss("forest_log_prob", Problem, _run, _empty_gradients)
