"""Log-probability of the chosen children at nodes that decide by a softmax:
``torch.ops.hstree.wide_log_prob``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops._tree_op import TreeOp


def log_prob_on_paths(
    score_of: Callable[[Tensor], Tensor], begin: Tensor, end: Tensor, path: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    first_row, width, child = path.long().unbind(1)
    # The children of all nodes of all paths are numbered in one row: those of entry i of the table
    # are starts[i] to starts[i + 1]. A path has consecutive entries, and so consecutive places.
    starts = F.pad(width.cumsum(0), (1, 0))
    place = starts[begin].unsqueeze(-1) + torch.arange(longest, device=begin.device)
    real = place < starts[end].unsqueeze(-1)
    place = place.where(real, 0).contiguous()
    # The entry that holds a place, and which of its children it is.
    node = torch.searchsorted(starts[1:], place, right=True)
    ordinal = place - starts[node]
    score = score_of(first_row[node] + ordinal)
    # Log-softmax over the scores of each node; the last place is for padding.
    of_node = torch.where(real, node - begin.unsqueeze(-1), longest)
    shape = (*score.shape[:-1], longest + 1)
    largest = score.new_full(shape, -torch.inf)
    largest = largest.scatter_reduce(-1, of_node, score.detach(), "amax")
    score = score - largest.gather(-1, of_node)
    total = score.new_zeros(shape).scatter_add(-1, of_node, score.exp())
    score = (score - total.gather(-1, of_node).log()).where(real, 0.0)
    return score.where(ordinal == child[node], 0.0).sum(-1), score


_op = TreeOp("wide_log_prob", log_prob_on_paths)


def wide_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    wide_offset: Tensor,
    wide_path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None = None,
    *,
    max_width: int,
    sparse: bool = False,
    order: Tensor | None = None,
) -> Tensor:
    r"""Log-probability that each row's target is reached at the wide nodes of its path, in each of
    T trees.

    .. math::
        \log p_{it} = \sum_{n \in \mathrm{wide}_t(y_i)} \log \mathrm{softmax}(W_{tn}\,
        h_i[\mathrm{subset}_t] + b_{tn})_c

    where c is the child of n that holds the target and :math:`W_{tn}` are the rows of n, one for
    each child.

    Equivalent to, for row i and tree t::

        begin, end = wide_offset[t, target[i]], wide_offset[t, target[i] + 1]
        for first_row, width, child in wide_path[begin:end]:
            rows = slice(first_row, first_row + width)
            z = weight[t, rows] @ hidden[i, feature_index[t]] + bias[t, rows]
            log_prob[i, t] += z.log_softmax(0)[child]

    Deterministic. Holds at most the scores [N, T, max_width]; forward mode also holds their rows.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: vectors of the children of wide nodes, [T, R, S], dtype of ``hidden``; see
            :func:`hstree.ops.path_log_prob` for autocast.
        bias: biases of the children of wide nodes, [T, R], dtype of ``weight``, or None.
        target: classes, [N] int64; a negative value marks an ignored row: log-probability 0 and no
            gradient.
        wide_offset: begin and end of the wide nodes of each class in ``wide_path``,
            [T, V + 1] int64.
        wide_path: wide nodes of the paths, root first, as (first_row, width, child), [P, 3] int32.
        leaf_position: rank of each class's leaf from the left, [T, V] int32.
        feature_index: features that each tree reads, [T, S] int32, increasing; None: all, S = D.
        max_width: largest sum of the widths on a path, at most 2**20.
        sparse: as in :func:`hstree.ops.path_log_prob`.
        order: as in :func:`hstree.ops.path_log_prob`.

    Returns:
        Log-probabilities, [N, T], in nats, float32 (float64 for float64 hidden).

    Raises:
        RuntimeError: as in :func:`hstree.ops.path_log_prob`.

    Example:
        >>> import torch, hstree
        >>> from hstree.ops import wide_log_prob
        >>> t = hstree.trees.Tree.from_nested(((0, 1, 2), (3, 4, 5))).tables()
        >>> offset, path = torch.tensor(t.wide_offset)[None], torch.tensor(t.wide_path)
        >>> leaf_position = torch.tensor(t.leaf_position)[None]
        >>> hidden, weight = torch.randn(4, 8), torch.randn(1, t.n_wide_rows, 8)
        >>> target = torch.tensor([0, 5, 2, -1])
        >>> wide_log_prob(hidden, weight, None, target, offset, path, leaf_position,
        ...               max_width=t.max_width).shape
        torch.Size([4, 1])
    """
    return _op(
        sparse,
        hidden,
        weight,
        bias,
        target,
        wide_offset,
        wide_path,
        leaf_position,
        feature_index,
        max_width,
        order,
    )
