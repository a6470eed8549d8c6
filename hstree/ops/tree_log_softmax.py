"""Log-probabilities of all classes of a mixture of trees: ``torch.ops.hstree.tree_log_softmax``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._composed_tree_log_softmax import (
    composed_backward,
    composed_log_prob,
    leaf_classes,
    with_leaf_rows,
    without_leaf_rows,
)
from hstree.ops._gradient import once, register_gradient


def tree_log_softmax(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    *,
    wide_begin: int,
    root_begin: int,
    leaf_score: Tensor | None = None,
    leaf_bias: Tensor | None = None,
) -> Tensor:
    r"""Log-probability of every class under a mixture of T trees, from the scores of all nodes.

    .. math::
        \log P(y) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e)\Bigr)

    A binary node with score z has log sigmoid(z) for its left edge and log sigmoid(-z) for its
    right edge. A wide node has the log-softmax of its rows. The CPU kernel visits each tree once
    from the root down, and back in the backward pass. On CUDA all nodes are computed at once; the
    backward pass uses torch's own operators.

    A leaf group has the log-softmax of ``leaf_score + leaf_bias`` over its classes. All trees share
    ``leaf_score``, which the CPU kernel reads where it is: less work and memory than with a row of
    ``score`` for each class and tree. The backward pass, and other devices, make these rows.

    The vectors of the CPU kernel are over contexts; a single context has vectors over classes.
    With leaf groups all trees share the exponentials of ``leaf_score``, relative to the row's
    largest, where no group has less than 1e-25 of it. Threads divide the
    contexts, the trees and the classes. Deterministic for any number of threads. On CUDA the
    forward pass is deterministic, without atomics and without waiting for the device.
    Differentiable once. The backward pass on CUDA holds the log-probabilities of all edges several
    times.

    Args:
        score: scores of the nodes, [T, R, N], float32 or float64: R rows for each tree, N contexts.
            First the binary nodes, one row each, then the children of wide nodes, then the children
            of a wide root.
        log_gate: log-weights of the trees, gamma [N, T], dtype of ``score``.
        node: nodes in preorder, int32 [T, m, 5], padded with zeros: block (0 binary, 1 wide, 2 wide
            root), first row in the block, first edge, number of edges, edge above (-1 for the
            root).
        edge: edges, int32 [T, E, 2]: the node above, and the node below or ``~class`` for a leaf.
            At most 64 nodes on a path. :func:`hstree.ops.tree_topk` has the same tables.
        n_classes: number of classes, V. A tree of a single class has no nodes.
        wide_begin: first row of the second block.
        root_begin: first row of the third block.
        leaf_score: scores of the classes in the leaf groups of all trees, [N, V], dtype of
            ``score``; None: there are no leaf groups. A node of block 1 whose first row is
            ``root_begin - wide_begin`` or more is a leaf group: its children are all classes, and
            have no rows of ``score``. Rows of different groups must not overlap, and end at
            ``root_begin - wide_begin + V``.
        leaf_bias: biases of the classes in the leaf groups of each tree, [T, V], dtype of
            ``score``; required with ``leaf_score``.

    Returns:
        Log-probabilities, [N, V], in nats, dtype of ``score``.

    Raises:
        ValueError: if only one of ``leaf_score`` and ``leaf_bias`` is given.
        RuntimeError: for a wrong shape, dtype, device or number. On the CPU also for tables that
            are not those of trees; on CUDA these give NaN or another class's number.

    Example:
        >>> import torch
        >>> from hstree.ops import tree_log_softmax
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> score = torch.tensor([[[1.0], [3.0]]])
        >>> begins = {"wide_begin": 2, "root_begin": 2}
        >>> tree_log_softmax(score, torch.zeros(1, 1), node, edge, 3, **begins).exp()
        tensor([[0.6964, 0.0347, 0.2689]])
    """
    if leaf_score is not None and leaf_bias is not None:
        if score.device.type in ("cpu", "cuda"):
            shared: Tensor = _leaf_tree_log_softmax(
                leaf_score, leaf_bias, score, log_gate, node, edge, wide_begin, root_begin,
                n_classes,
            )  # fmt: skip
            return shared
        classes = leaf_classes(node, edge, root_begin - wide_begin, n_classes)
        score = with_leaf_rows(score, leaf_score, leaf_bias, classes, root_begin)
        root_begin += n_classes
    elif leaf_score is not None or leaf_bias is not None:
        given, missing = ("score", "bias") if leaf_bias is None else ("bias", "score")
        raise ValueError(f"leaf_{missing}: expected a tensor with leaf_{given}, got None")
    if score.device.type not in ("cpu", "cuda"):
        return composed_log_prob(score, log_gate, node, edge, n_classes, wide_begin, root_begin)
    log_prob: Tensor = _tree_log_softmax(
        score, log_gate, node, edge, wide_begin, root_begin, n_classes
    )
    return log_prob


def _fake(score: Tensor, *rest: Any) -> Tensor:
    *_, n_classes = rest
    if score.dim() != 3:
        raise RuntimeError(f"score: expected shape [T, R, N], got {tuple(score.shape)}")
    return score.new_empty((score.shape[2], n_classes))


def _backward_fake(
    grad: Tensor, log_prob: Tensor, score: Tensor, log_gate: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return score.new_empty(score.shape), log_gate.new_empty(log_gate.shape)


class TreeLogSoftmax(torch.autograd.Function):
    forward: Any = torch.ops.hstree.tree_log_softmax.default

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.wide_begin, ctx.root_begin, _classes = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        backward = torch.ops.hstree.tree_log_softmax_backward.default
        begins = ctx.wide_begin, ctx.root_begin
        gradients = once("tree_log_softmax", backward, grad, *ctx.saved_tensors, *begins)
        return *gradients, *[None] * 5


class LeafTreeLogSoftmax(torch.autograd.Function):
    forward: Any = torch.ops.hstree.leaf_tree_log_softmax.default

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.wide_begin, ctx.root_begin, ctx.classes = inputs
        ctx.save_for_backward(output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        numbers = ctx.wide_begin, ctx.root_begin, ctx.classes
        gradients = once(
            "leaf_tree_log_softmax", _leaf_gradients, grad, *ctx.saved_tensors, *numbers
        )
        return *gradients, *[None] * 5


def _leaf_fake(leaf_score: Tensor, leaf_bias: Tensor, *rest: Any) -> Tensor:
    return _fake(*rest)


def _leaf_gradients(
    grad: Tensor,
    log_prob: Tensor,
    leaf_score: Tensor,
    leaf_bias: Tensor,
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    wide_begin: int,
    root_begin: int,
    n_classes: int,
) -> tuple[Tensor, ...]:
    """Those of the first four arguments, of the leaf groups as wide nodes."""
    classes = leaf_classes(node, edge, root_begin - wide_begin, n_classes)
    score = with_leaf_rows(score, leaf_score, leaf_bias, classes, root_begin)
    begins = wide_begin, root_begin + n_classes
    grad, grad_log_gate = torch.ops.hstree.tree_log_softmax_backward(
        grad, log_prob, score, log_gate, node, edge, *begins
    )
    grad_score, grad_leaf_score, grad_leaf_bias = without_leaf_rows(grad, classes, root_begin)
    return grad_leaf_score, grad_leaf_bias, grad_score, grad_log_gate


# Where there is no kernel.
torch.library.impl("hstree::tree_log_softmax_backward", "default", composed_backward)
torch.library.register_fake("hstree::tree_log_softmax", _fake)
torch.library.register_fake("hstree::leaf_tree_log_softmax", _leaf_fake)
torch.library.register_fake("hstree::tree_log_softmax_backward", _backward_fake)
_tree_log_softmax = register_gradient(TreeLogSoftmax)
_leaf_tree_log_softmax = register_gradient(LeafTreeLogSoftmax)
