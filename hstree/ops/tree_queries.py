"""What a mixture of trees is asked, besides the log-probabilities of targets: those of all classes,
``torch.ops.hstree.tree_log_softmax``; the most probable classes, from the scores of all nodes,
``group_topk``, or by a search, ``tree_topk``; draws, ``sample``.

All read the trees from the tables ``node``, ``edge`` and ``leaf_edge`` of
:func:`hstree.trees.ensemble_tables.ensemble_tables`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree._checks import check_int, in_torch_func
from hstree._numerics import is_transformed
from hstree.ops._composed_tree_log_softmax import (
    class_rows,
    composed_backward,
    composed_log_prob,
    with_class_rows,
    without_class_rows,
)
from hstree.ops._gradient import once, register_gradient, register_no_gradient

_op = torch.ops.hstree.tree_log_softmax.default


def tree_log_softmax(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    *,
    root_begin: int,
    class_score: Tensor | None = None,
    class_bias: Tensor | None = None,
) -> Tensor:
    r"""Log-probability of every class under a mixture of T trees, from the scores of all nodes.

    .. math::
        \log P(y) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e)\Bigr)

    A binary node with score z has log sigmoid(z) for its left edge and log sigmoid(-z) for its
    right edge. A wide root has the log-softmax of its rows, a group of classes that of
    ``class_score + class_bias`` over its classes. The CPU kernel visits each tree once from the
    root down, and back in the backward pass. On CUDA all nodes are computed at once; the backward
    pass uses torch's own operators.

    All trees share ``class_score``, which the kernels read where it is: less work and memory than
    with a row of ``score`` for each class and tree. The backward pass, and other devices, make
    these rows.

    The vectors of the CPU kernel are over contexts; a single context has vectors over classes.
    With groups all trees share the exponentials of ``class_score``, relative to the row's largest,
    where no group has less than 1e-25 of it. Threads divide the contexts, the trees and the
    classes. Deterministic for any number of threads. On CUDA the forward pass is deterministic,
    without atomics and without waiting for the device. Differentiable once. The backward pass on
    CUDA holds the log-probabilities of all edges several times.

    Args:
        score: scores of the nodes, [T, R, N], float32 or float64: R rows for each tree, N contexts.
            First the binary nodes, one row each, then the children of a wide root.
        log_gate: log-weights of the trees, gamma [N, T], dtype of ``score``.
        node: nodes in preorder, int32 [T, m, 5], padded with zeros: kind (0 binary, 1 group of
            classes, 2 wide root), its first row (of a binary node among these, of a root 0, of a
            group the place of its first class among the leaves), first edge, number of edges, edge
            above (-1 for the root). The children of a group are all classes.
        edge: edges, int32 [T, E, 2]: the node above, and the node below or ``~class`` for a leaf.
            At most 64 nodes on a path.
        n_classes: number of classes, V. A tree of a single class has no nodes.
        root_begin: first row of a wide root.
        class_score: scores of the classes in groups, [N, V], dtype of ``score``; None: there are
            no groups.
        class_bias: biases of the classes in the groups of each tree, [T, V], dtype of ``score``;
            required with ``class_score``.

    Returns:
        Log-probabilities, [N, V], in nats, dtype of ``score``.

    Raises:
        ValueError: if only one of ``class_score`` and ``class_bias`` is given.
        RuntimeError: for a wrong shape, dtype, device or number. On the CPU also for tables that
            are not those of trees; on CUDA these give NaN or another class's number.

    Example:
        >>> import torch
        >>> from hstree.ops import tree_log_softmax
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> score = torch.tensor([[[1.0], [3.0]]])
        >>> tree_log_softmax(score, torch.zeros(1, 1), node, edge, 3, root_begin=2).exp()
        tensor([[0.6964, 0.0347, 0.2689]])
    """
    if (class_score is None) != (class_bias is None):
        given, missing = ("score", "bias") if class_bias is None else ("bias", "score")
        raise ValueError(f"class_{missing}: expected a tensor with class_{given}, got None")
    if score.device.type in ("cpu", "cuda"):
        run: Any = _op
        if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
            run = _TreeLogSoftmax.apply if in_torch_func() else _record
        log_prob: Tensor = run(
            score, log_gate, node, edge, root_begin, n_classes, class_score, class_bias
        )
        return log_prob
    class_begin = root_begin
    if class_score is not None and class_bias is not None:
        classes = class_rows(node, edge, n_classes)
        score = with_class_rows(score, class_score, class_bias, classes, root_begin)
        root_begin += n_classes
    return composed_log_prob(score, log_gate, node, edge, n_classes, class_begin, root_begin)


def _log_softmax_fake(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    root_begin: int,
    n_classes: int,
    class_score: Tensor | None = None,
    class_bias: Tensor | None = None,
) -> Tensor:
    if score.dim() != 3:
        raise RuntimeError(f"score: expected shape [T, R, N], got {tuple(score.shape)}")
    return score.new_empty((score.shape[2], n_classes))


def _log_softmax_backward_fake(
    grad: Tensor, log_prob: Tensor, score: Tensor, log_gate: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return score.new_empty(score.shape), log_gate.new_empty(log_gate.shape)


class _TreeLogSoftmax(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        score, log_gate, node, edge, ctx.root_begin, ctx.n_classes, *of_classes = inputs
        ctx.save_for_backward(output, score, log_gate, node, edge, *of_classes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        numbers = ctx.root_begin, ctx.n_classes
        grad_score, grad_log_gate, *of_classes = once(
            "tree_log_softmax", _gradients, grad, *ctx.saved_tensors, *numbers
        )
        return grad_score, grad_log_gate, *[None] * 4, *of_classes


def _gradients(
    grad: Tensor,
    log_prob: Tensor,
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    class_score: Tensor | None,
    class_bias: Tensor | None,
    root_begin: int,
    n_classes: int,
) -> tuple[Tensor | None, ...]:
    """Those of score, log_gate, class_score and class_bias."""
    backward = torch.ops.hstree.tree_log_softmax_backward.default
    if class_score is None or class_bias is None:
        begins = root_begin, root_begin
        return *backward(grad, log_prob, score, log_gate, node, edge, *begins), None, None
    classes = class_rows(node, edge, n_classes)
    score = with_class_rows(score, class_score, class_bias, classes, root_begin)
    begins = root_begin, root_begin + n_classes
    of_rows, of_gate = backward(grad, log_prob, score, log_gate, node, edge, *begins)
    of_score, *of_classes = without_class_rows(of_rows, classes, root_begin)
    return of_score, of_gate, *of_classes


def group_topk(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    k: int,
    *,
    root_begin: int,
    class_score: Tensor,
    class_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""The k classes of each row with the largest :func:`hstree.ops.tree_log_softmax`, of trees
    with groups, without writing all of it.

    .. math::
        P(y) = e^{s_y} \sum_t e^{b_{ty}} \, \frac{e^{\gamma_t} P_t(\mathrm{group}_t(y))}
        {\sum_{v \in \mathrm{group}_t(y)} e^{s_v + b_{tv}}}

    with the scores s of ``class_score``, the biases b of ``class_bias`` and the log-gates
    :math:`\gamma`. All trees share the exponentials of the scores, and the logarithms are those of
    k classes. Only on the CPU. Not differentiable. Deterministic for any number of threads, which
    divide the rows; the result of a row does not depend on the others.

    Args:
        score, log_gate, node, edge, n_classes, root_begin, class_score, class_bias: those of
            :func:`hstree.ops.tree_log_softmax`.
        k: number of classes to return, in [1, V].

    Returns:
        Log-probabilities [N, k], most probable first, and classes [N, k] int64, equally probable
        ones by number. NaN and -1 for a row with a NaN, or whose k-th class or any group has a
        share that could lose digits: that of a group is less than 1e-25 of the row's largest, or
        another class, with a share that is 0 in float32, could be more probable.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, number or table.

    Example:
        >>> import torch
        >>> from hstree.ops import group_topk
        >>> node = torch.tensor([[[2, 0, 0, 2, -1], [1, 0, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> log_prob, classes = group_topk(
        ...     torch.tensor([[[1.0], [0.0]]]), torch.zeros(1, 1), node, edge, 3, 2, root_begin=0,
        ...     class_score=torch.tensor([[3.0, 0.0, 0.0]]), class_bias=torch.zeros(1, 3))
        >>> log_prob.exp(), classes
        (tensor([[0.6964, 0.2689]]), tensor([[0, 2]]))
    """
    log_prob, classes = torch.ops.hstree.group_topk(
        score, log_gate, node, edge, root_begin, n_classes, class_score, class_bias, k
    )
    return log_prob, classes


def _group_topk_fake(score: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    shape = (score.shape[2], rest[-1])
    return score.new_empty(shape), score.new_empty(shape, dtype=torch.int64)


def tree_topk(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    class_bias: Tensor | None,
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
        class_weight: vectors of the classes in groups, [V, D], or None, as with ``weight``: below
            the roots are binary nodes or groups. They are shared by all trees and read all
            features; each product with a row of ``hidden`` is computed once. The classes of a group
            have the log-softmax of their scores.
        class_bias: biases of the classes in groups, [T, V], or None.
        root_log_prob: log-probabilities of the children of a wide root, [T, N, C], or None; dtype
            of ``log_gate``. Each wide root has C children.
        log_gate: log-weights of the trees, gamma [N, T]: float32, or float64 for float64 hidden.
        feature_index: features that each tree reads, [T, S] int32, increasing; None: all, S = D.
        node, edge: see :func:`hstree.ops.tree_log_softmax`; the row of a binary node is one of
            ``weight``.
        leaf_edge: edge above the leaf of each class, int32 [T, V].
        k: number of classes to return, in [1, V].
        most_scored: number of vectors of ``weight`` and ``class_weight`` that a row may be
            multiplied with; None: any. The search of a row that needs more stops.

    Returns:
        Log-probabilities [N, k], most probable first, and classes [N, k] int64. Equally probable
        classes are sorted by number; which of them are among the k is undefined. NaN and -1 for a
        row whose search stopped.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, number or table.

    Example:
        >>> import torch
        >>> from hstree.ops import tree_topk
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
        >>> weight = torch.tensor([[[1.0], [3.0]]])
        >>> log_prob, classes = tree_topk(torch.ones(1, 1), weight, None, None, None, None,
        ...                               torch.zeros(1, 1), None, node, edge, leaf_edge, 2)
        >>> log_prob.exp(), classes
        (tensor([[0.6964, 0.2689]]), tensor([[0, 2]]))

    Source: Fagin, Lotem and Naor, Optimal aggregation algorithms for middleware, JCSS 2003.
    """
    most = -1 if most_scored is None else check_int("most_scored", most_scored, 0)
    vectors = hidden, weight, bias, class_weight, class_bias, root_log_prob, log_gate
    log_prob, classes = torch.ops.hstree.tree_topk(
        *vectors, feature_index, node, edge, leaf_edge, k, most
    )
    return log_prob, classes


def sample(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    class_weight: Tensor | None,
    class_bias: Tensor | None,
    root_log_prob: Tensor | None,
    log_gate: Tensor,
    feature_index: Tensor | None,
    node: Tensor,
    edge: Tensor,
    leaf_edge: Tensor,
    seed: Tensor,
    n: int = 1,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Classes drawn from a mixture of T trees, and their log-probabilities under the mixture.

    .. math::
        \log P(y \mid x) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e \mid x)\Bigr)

    A draw chooses a tree by the gate, then a child at each node from the root down. It scores the
    nodes on that path, and those on the paths to the same class in the other trees. On the CPU a
    node is scored once for all draws of a row.

    The random numbers are Philox4x32-10 of the seed, the place of the draw and the node's depth:
    the same seed gives the same draws, for any number of threads. CPU and CUDA share them; their
    draws differ only where rounding decides. Not differentiable. No synchronization on CUDA.

    Args:
        hidden, weight, bias, class_weight, class_bias: see :func:`hstree.ops.tree_topk`.
        root_log_prob: log-probabilities of the children of a wide root, [T, N, C], or None, after
            ``temperature``; dtype of ``log_gate``.
        log_gate, feature_index, node, edge, leaf_edge: see :func:`hstree.ops.tree_topk`.
        seed: seed of the draws, int64 [1], on the device of ``hidden``.
        n: number of draws for each row.
        temperature: divisor of the scores of all nodes but a wide root, positive.

    Returns:
        Classes [N, n] int64, and their log-probabilities [N, n] in nats, dtype of ``log_gate``. For
        a row with NaN some classes, and NaN.

    Raises:
        RuntimeError: for a wrong shape, dtype, device, number or table. On CUDA tables are not
            checked.

    Example:
        >>> import torch
        >>> from hstree.ops import sample
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
        >>> weight = torch.tensor([[[1.0], [3.0]]])  # probabilities 0.696, 0.035 and 0.269
        >>> classes, log_prob = sample(torch.ones(1, 1), weight, None, None, None, None,
        ...                            torch.zeros(1, 1), None, node, edge, leaf_edge,
        ...                            torch.tensor([3]), n=1000)
        >>> bool((classes == 0).float().mean().sub(0.696).abs() < 0.05), log_prob.shape
        (True, torch.Size([1, 1000]))
    """
    vectors = hidden, weight, bias, class_weight, class_bias, root_log_prob, log_gate
    classes, log_prob = torch.ops.hstree.sample(
        *vectors, feature_index, node, edge, leaf_edge, seed, n, temperature
    )
    return classes, log_prob


def _tree_topk_fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    log_gate, k = arguments[5], arguments[10]
    shape = (hidden.shape[0], k)
    return log_gate.new_empty(shape), log_gate.new_empty(shape, dtype=torch.int64)


def _sample_fake(hidden: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    log_gate, n = arguments[5], arguments[11]
    shape = (hidden.shape[0], n)
    return log_gate.new_empty(shape, dtype=torch.int64), log_gate.new_empty(shape)


# Where there is no kernel.
torch.library.impl("hstree::tree_log_softmax_backward", "default", composed_backward)
torch.library.register_fake("hstree::tree_log_softmax", _log_softmax_fake)
torch.library.register_fake("hstree::tree_log_softmax_backward", _log_softmax_backward_fake)
torch.library.register_fake("hstree::group_topk", _group_topk_fake)
torch.library.register_fake("hstree::tree_topk", _tree_topk_fake)
torch.library.register_fake("hstree::sample", _sample_fake)
_record = register_gradient(_op, _TreeLogSoftmax)
register_no_gradient("group_topk", "TreeEnsemble.topk")
register_no_gradient("tree_topk", "TreeEnsemble.topk")
register_no_gradient("sample", "TreeEnsemble.candidate_log_prob")
