"""The most probable classes of a mixture of trees, from the scores of all nodes:
``torch.ops.hstree.leaf_tree_topk``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._gradient import register_no_gradient


def leaf_tree_topk(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    k: int,
    *,
    wide_begin: int,
    root_begin: int,
    leaf_score: Tensor,
    leaf_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""The k classes of each row with the largest :func:`hstree.ops.tree_log_softmax`, of trees
    with leaf groups, without writing all of it.

    .. math::
        P(y) = e^{s_y} \sum_t e^{b_{ty}} \, \frac{e^{\gamma_t} P_t(\mathrm{group}_t(y))}
        {\sum_{v \in \mathrm{group}_t(y)} e^{s_v + b_{tv}}}

    with the scores s of ``leaf_score``, the biases b of ``leaf_bias`` and the log-gates
    :math:`\gamma`. All trees share the exponentials of the scores, and the logarithms are those of
    k classes. Only on the CPU. Not differentiable. Deterministic for any number of threads, which
    divide the rows; the result of a row does not depend on the others.

    Args:
        score, log_gate, node, edge, n_classes, wide_begin, root_begin, leaf_score, leaf_bias:
            those of :func:`hstree.ops.tree_log_softmax`.
        k: number of classes to return, in [1, V].

    Returns:
        Log-probabilities [N, k], most probable first, and classes [N, k] int64, equally probable
        ones by number. NaN and -1 for a row with a NaN, or whose k-th class or any leaf group has a
        share that could lose digits: that of a group is less than 1e-25 of the row's largest, or
        another class, with a share that is 0 in float32, could be more probable.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, number or table.

    Example:
        >>> import torch
        >>> from hstree.ops import leaf_tree_topk
        >>> node = torch.tensor([[[2, 0, 0, 2, -1], [1, 0, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> log_prob, classes = leaf_tree_topk(
        ...     torch.tensor([[[1.0], [0.0]]]), torch.zeros(1, 1), node, edge, 3, 2,
        ...     wide_begin=0, root_begin=0,
        ...     leaf_score=torch.tensor([[3.0, 0.0, 0.0]]), leaf_bias=torch.zeros(1, 3))
        >>> log_prob.exp(), classes
        (tensor([[0.6964, 0.2689]]), tensor([[0, 2]]))
    """
    log_prob, classes = torch.ops.hstree.leaf_tree_topk(
        leaf_score, leaf_bias, score, log_gate, node, edge, wide_begin, root_begin, n_classes, k
    )
    return log_prob, classes


def _fake(leaf_score: Tensor, leaf_bias: Tensor, score: Tensor, *rest: Any) -> Any:
    shape = (leaf_score.shape[0], rest[-1])
    return score.new_empty(shape), score.new_empty(shape, dtype=torch.int64)


torch.library.register_fake("hstree::leaf_tree_topk", _fake)
register_no_gradient("leaf_tree_topk", "TreeEnsemble.topk")
