"""Log-probabilities of the paths of binary trees: ``torch.ops.hstree.path_log_prob``, and
``torch.ops.hstree.forward``, which returns its first two results."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hstree._checks import in_torch_func
from hstree._numerics import autocasts, is_transformed, sum_dtype
from hstree.ops import _kernels
from hstree.ops._gradient import once, recorder, register_gradient
from hstree.ops._row_sparse import sparse_gradient

_op = torch.ops.hstree.path_log_prob.default


def path_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    path_offset: Tensor,
    path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None = None,
    *,
    max_depth: int,
    sparse: bool = False,
) -> Tensor:
    r"""Log-probability of each row's target in each of T binary trees.

    .. math::
        \log p_{it} = \sum_{(n, c) \in \mathrm{path}_t(y_i)} \log \sigma(c\, z_{itn}), \qquad
        z_{itn} = \langle h_i[\mathrm{subset}_t], w_{tn} \rangle + b_{tn}, \quad c = \pm 1

    Equivalent to, for row i and tree t::

        entry = path[path_offset[t, target[i]] : path_offset[t, target[i] + 1]]
        z = weight[t, entry >> 1] @ hidden[i, feature_index[t]] + bias[t, entry >> 1]
        log_prob[i, t] = F.logsigmoid(torch.where(entry & 1 == 1, z, -z)).sum()

    Sums are computed in float32 (float64 for float64) in a fixed order: the result is bitwise
    identical on every run. On the CPU, up to four blocks of memory of freed gradients and
    workspaces are kept and reused in later steps.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: vectors of the inner nodes, [T, M, S], dtype of ``hidden``. Under autocast
            ``hidden`` is cast to the dtype of ``weight``; the weights are not cast, which would
            cost O(V).
        bias: biases of the inner nodes, [T, M], dtype of ``weight``, or None.
        target: classes, [N] int64; a negative value marks an ignored row: log-probability 0 and no
            gradient.
        path_offset: begin and end of the path of each class in ``path``, [T, V + 1] int64.
        path: nodes of the paths, root first, as ``node << 1 | goes_left``, [P] int32.
        leaf_position: rank of each class's leaf from the left, [T, V] int32: the order in which
            rows are processed. Ranks that do not belong to the paths may give wrong gradients.
        feature_index: features that each tree reads, [T, S] int32, increasing; None: all, S = D.
        max_depth: largest number of nodes on a path, at most 64.
        sparse: whether the gradients of weight and bias are sparse COO tensors with each visited
            row once, as with ``torch.nn.Embedding(sparse=True)``. Only in eager mode, and not
            under torch.func.

    Returns:
        Log-probabilities, [N, T], in nats, float32 (float64 for float64 hidden).

    Raises:
        RuntimeError: for a wrong shape, dtype or device and, on the CPU, an index out of range. On
            CUDA, where a check would have to wait for the device, a target out of range makes the
            log-probabilities of its row NaN, and a table out of range makes those of its tree NaN
            in all rows, without gradient.

    Example:
        >>> import torch, hstree
        >>> from hstree.ops import path_log_prob
        >>> t = hstree.trees.random_tree(6, seed=0).tables()
        >>> offset, path = torch.tensor(t.path_offset)[None], torch.tensor(t.path)
        >>> leaf_position = torch.tensor(t.leaf_position)[None]
        >>> hidden, weight = torch.randn(4, 8), torch.randn(1, t.n_binary, 8)
        >>> target = torch.tensor([0, 5, 2, -1])
        >>> path_log_prob(hidden, weight, None, target, offset, path, leaf_position,
        ...               max_depth=t.max_depth).shape
        torch.Size([4, 1])

    Source: Morin and Bengio, Hierarchical probabilistic neural network language model, 2005.
    """
    if hidden.dtype != weight.dtype and hidden.is_floating_point() and autocasts(hidden.device):
        hidden = hidden.to(weight.dtype)
    tables = target, path_offset, path, leaf_position, feature_index, max_depth
    run: Any = _op
    if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
        run = _PathLogProb.apply if in_torch_func() else _record
    if sparse and torch.is_grad_enabled() and not is_transformed():
        run = _record_sparse
        if torch.compiler.is_compiling():
            from hstree._uncompiled import uncompiled

            run = partial(uncompiled, run)
    log_prob: Tensor = run(hidden, weight, bias, *tables)[0]
    return log_prob


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    path_offset: Tensor,
    path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if hidden.dim() != 2:
        raise RuntimeError(f"hidden: expected shape [N, D], got {tuple(hidden.shape)}")
    if weight.dim() != 3:
        raise RuntimeError(f"weight: expected shape [T, M, S], got {tuple(weight.shape)}")
    if hidden.dtype != weight.dtype:
        raise RuntimeError(f"weight: expected dtype {hidden.dtype}, got {weight.dtype}")
    rows, trees, dtype = hidden.shape[0], weight.shape[0], sum_dtype(hidden.dtype)
    plan = 4 * trees * rows + 1 + trees if _kernels.of_cuda(hidden) else 0
    return (
        hidden.new_empty((rows, trees), dtype=dtype),
        hidden.new_empty((rows, trees, max_depth), dtype=dtype),
        hidden.new_empty((trees, rows), dtype=torch.int64),
        hidden.new_empty((plan,), dtype=torch.int32),
    )


def _backward_fake(
    grad_log_prob: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    path_offset: Tensor,
    path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None,
    score: Tensor,
    order: Tensor,
    plan: Tensor,
    output_mask: Sequence[bool],
    sparse: bool,
) -> tuple[Tensor, ...]:
    visited: Any = 0
    shapes: list[Sequence[Any]] = [hidden.shape, weight.shape, weight.shape[:2]]
    if sparse:
        visited = torch.library.get_ctx().new_dynamic_size()
        shapes[1:] = [(visited, weight.shape[2]), (visited,)]
    return (
        *(
            hidden.new_empty(shape if want else (0,))
            for shape, want in zip(shapes, output_mask, strict=True)
        ),
        hidden.new_empty((2, visited), dtype=torch.int64),
    )


class _PathLogProb(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        hidden, weight, bias, *tables, _max_depth = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # no zeros of the size of the scores
        ctx.save_for_backward(bias, hidden, weight, *tables, *output[1:])

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, *_: Any) -> Any:
        return _gradients(ctx, grad_log_prob, False)


class _Sparse(_PathLogProb):
    """Row-sparse gradients of weight and bias."""

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, *_: Any) -> Any:
        return _gradients(ctx, grad_log_prob, True)


def _gradients(ctx: Any, grad_log_prob: Tensor | None, sparse: bool) -> Any:
    if grad_log_prob is None:
        return (None,) * 9
    bias, *saved = ctx.saved_tensors
    _hidden, weight, *_tables = saved
    _of_hidden, of_weight, of_bias = needed = ctx.needs_input_grad[:3]
    sparse = sparse and (of_weight or of_bias)  # on CUDA the index waits for the device
    op = torch.ops.hstree.path_log_prob_backward.default
    grad_hidden, grad_weight, grad_bias, index = once(
        "path_log_prob", op, grad_log_prob, *saved, needed, sparse
    )
    if sparse and of_weight:
        grad_weight = sparse_gradient(weight, index, grad_weight)
    if sparse and of_bias:
        grad_bias = sparse_gradient(bias, index, grad_bias)
    gradients = zip((grad_hidden, grad_weight, grad_bias), needed, strict=True)
    return *(gradient if need else None for gradient, need in gradients), *[None] * 6


torch.library.register_fake("hstree::path_log_prob", _fake)
torch.library.register_fake("hstree::path_log_prob_backward", _backward_fake)
_record = register_gradient(_op, _PathLogProb)
_record_sparse = recorder(_Sparse)
