"""The most probable classes of a mixture of trees: ``torch.ops.hstree.tree_topk``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import check_int
from hstree.ops._gradient import register_no_gradient
from hstree.ops._tree_mixture import split_arguments


def tree_topk(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wide_weight: Tensor | None,
    wide_bias: Tensor | None,
    leaf_weight: Tensor | None,
    leaf_bias: Tensor | None,
    root_log_prob: Tensor | None,
    log_gate: Tensor,
    feature_index: Tensor | None,
    node: Tensor,
    edge: Tensor,
    leaf_edge: Tensor,
    k: int,
    most_scored: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The k most probable classes of each row under a mixture of T trees, by best-first search.

    .. math::
        \log P(y \mid x) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e \mid x)\Bigr)

    The log-probability of a path can only decrease on the way down. A heap of the open edges of a
    tree therefore yields its leaves in decreasing order, and the best open edges of all trees bound
    every class that was not found yet. Exact except for rounding. If the k-th class has probability
    p, the trees yield at most T / p classes, and each is looked up on T paths of L nodes:
    O(T^2 L / p) nodes, at most all. The flatter the distribution, the longer the search.

    Only on the CPU. Not differentiable. Deterministic for any number of threads.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: vectors of the binary nodes, w [T, M, S], dtype of ``hidden``, or None. The left
            edge has log-probability log sigmoid(z), the right edge log sigmoid(-z), with
            z = dot(w, x) + b.
        bias: biases of the binary nodes, b [T, M], or None.
        wide_weight: vectors of the children of wide nodes, [T, R, S], or None. The edges of a node
            have the log-softmax over its rows.
        wide_bias: biases of the children of wide nodes, [T, R], or None.
        leaf_weight: vectors of the classes in leaf groups, [V, D], or None. They are shared by all
            trees and read all features; each product with a row of ``hidden`` is computed once.
        leaf_bias: biases of the classes in leaf groups, [T, V], or None.
        root_log_prob: log-probabilities of the children of a wide root, [T, N, C], or None; dtype
            of ``log_gate``. Each wide root of block 2 has C children.
        log_gate: log-weights of the trees, gamma [N, T]: float32, or float64 for float64 hidden.
        feature_index: features that each tree reads, [T, S] int32, increasing; None: all, S = D.
        node: nodes in preorder, int32 [T, m, 5]: block (0 ``weight``, 1 ``wide_weight``, 2
            ``root_log_prob``), first row in the block, first edge, number of edges, edge above (-1
            for the root). A node of block 1 whose first row is R or more is a leaf group: its
            children are all classes, and have rows of ``leaf_weight``.
        edge: edges, int32 [T, E, 2]: the node above, and the node below or ``~class`` for a leaf.
        leaf_edge: edge above the leaf of each class, int32 [T, V].
        k: number of classes to return, in [1, V].
        most_scored: number of vectors of ``weight``, ``wide_weight`` and ``leaf_weight`` that a row
            may be multiplied with; None: any. The search of a row that is not finished then is
            given up.

    Returns:
        Log-probabilities [N, k], most probable first, and classes [N, k] int64. Equally probable
        classes are sorted by number; which of them are among the k is undefined. NaN and -1 for a
        row whose search was given up.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, number or table.

    Example:
        >>> import torch
        >>> from hstree.ops import tree_topk
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
        >>> weight = torch.tensor([[[1.0], [3.0]]])
        >>> log_prob, classes = tree_topk(torch.ones(1, 1), weight, None, None, None, None, None,
        ...                               None, torch.zeros(1, 1), None, node, edge, leaf_edge, 2)
        >>> log_prob.exp(), classes
        (tensor([[0.6964, 0.2689]]), tensor([[0, 2]]))

    Source: Fagin, Lotem and Naor, Optimal aggregation algorithms for middleware, JCSS 2003.
    """
    most = -1 if most_scored is None else check_int("most_scored", most_scored, 0)
    vectors = weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias
    tables = feature_index, node, edge, leaf_edge
    log_prob, classes = torch.ops.hstree.tree_topk(
        hidden, *vectors, root_log_prob, log_gate, *tables, k, most
    )
    return log_prob, classes


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    mixture, (k, *_most_scored) = split_arguments(arguments)
    log_gate, shape = mixture.log_gate, (mixture.hidden.shape[0], k)
    return log_gate.new_empty(shape), log_gate.new_empty(shape, dtype=torch.int64)


torch.library.register_fake("hstree::tree_topk", _fake)
register_no_gradient(
    "tree_topk", "path_log_prob, wide_log_prob and leaf_log_prob, or TreeEnsemble.topk"
)
