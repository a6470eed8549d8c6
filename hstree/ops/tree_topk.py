"""The most probable classes of a mixture of trees: ``torch.ops.hstree.tree_topk``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._autograd import by_rows, register_autograd


def tree_topk(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wide_weight: Tensor | None,
    wide_bias: Tensor | None,
    root_log_prob: Tensor | None,
    log_gate: Tensor,
    feature_index: Tensor | None,
    node: Tensor,
    edge: Tensor,
    leaf_edge: Tensor,
    k: int,
) -> tuple[Tensor, Tensor]:
    r"""The k most probable classes of each row under a mixture of T trees, by best-first search.

    .. math::
        \log P(y \mid x) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e \mid x)\Bigr)

    A path's log-probability only falls on the way down, so the leaves of a tree come out of a heap
    of its open edges in falling order, and the best open edges of all trees bound every class not
    yet met; see :func:`hstree.reference.tree_topk_reference` for an equivalent in PyTorch. Exact
    but for rounding. Where the k-th class has probability p, at most T / p classes come out of the
    trees, each looked up by T paths of L nodes: O(T^2 L / p) nodes, at worst all. The flatter the
    distribution, the longer it takes.

    Args:
        hidden: [N, D]: float32, float64, bfloat16 or float16.
        weight: [T, M, S] of the binary nodes, dtype of ``hidden``, or None: an edge to the left has
            log-probability log sigmoid(z), to the right log sigmoid(-z), z = dot(w, x) + b.
        bias: [T, M] or None.
        wide_weight: [T, R, S] of the children of wide nodes, a row each, or None: log-softmax over
            the rows of a node.
        wide_bias: [T, R] or None.
        root_log_prob: [T, N, C], log-probabilities of the children of a wide root, or None.
        log_gate: gamma [N, T]; like ``root_log_prob`` float32, float64 for float64 hidden.
        feature_index: [T, S] int32, increasing, or None: S = D.
        node: int32 [T, m, 5], nodes in preorder: block (0 ``weight``, 1 ``wide_weight``, 2
            ``root_log_prob``), first row in it, first edge, number of edges, edge above (-1 for
            the root).
        edge: int32 [T, E, 2]: node above, and below it the node or ``~class`` of a leaf.
        leaf_edge: int32 [T, V], edge above each class.
        k: in [1, V].

    Returns:
        log-probabilities [N, k], most probable first, and classes [N, k] int64. Of equally probable
        classes the lower comes first; which of them are among the k is not defined.

    Raises:
        RuntimeError: for a shape, dtype, device, number or table that does not fit.

    On the CPU only. Not differentiable. Deterministic, for any number of threads.

    Example:
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
        >>> weight = torch.tensor([[[1.0], [3.0]]])
        >>> log_prob, classes = tree_topk(torch.ones(1, 1), weight, None, None, None, None,
        ...                               torch.zeros(1, 1), None, node, edge, leaf_edge, 2)
        >>> log_prob.exp(), classes
        (tensor([[0.6964, 0.2689]]), tensor([[0, 2]]))

    Fagin, Lotem and Naor, Optimal aggregation algorithms for middleware (JCSS 2003).
    """
    log_prob, classes = torch.ops.hstree.tree_topk(
        hidden,
        weight,
        bias,
        wide_weight,
        wide_bias,
        root_log_prob,
        log_gate,
        feature_index,
        node,
        edge,
        leaf_edge,
        k,
    )
    return log_prob, classes


def _fake(hidden: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    log_gate, k = rest[5], rest[-1]
    shape = (hidden.shape[0], k)
    return log_gate.new_empty(shape), log_gate.new_empty(shape, dtype=torch.int64)


def _no_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "hstree::tree_topk: not differentiable; take the log-probabilities of its classes by "
        "path_log_prob and wide_log_prob, or by TreeEnsemble.topk"
    )


torch.library.register_fake("hstree::tree_topk", _fake)
register_autograd(
    "tree_topk",
    _no_derivative,
    vmap=by_rows(torch.ops.hstree.tree_topk, (0, *[None] * 4, 1, 0, *[None] * 5), (0, 0)),
)
