"""Log-probabilities within groups of classes: ``torch.ops.hstree.group_log_prob``."""

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
from hstree.ops._row_sparse import cast, sparse_gradient

_op = torch.ops.hstree.group_log_prob.default


def group_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    cluster: Tensor,
    order: Tensor,
    begin: Tensor,
    *,
    max_width: int,
    sparse: bool = False,
) -> Tensor:
    r"""Log-probability of each row's target within its group of classes, in each of T partitions of
    the classes that share one output embedding.

    .. math::
        \log p_{it} = E_y \cdot h_i + b_{ty} - \log \sum_{v : c_t(v) = c_t(y)}
        \exp(E_v \cdot h_i + b_{tv}), \qquad y = y_i

    A group is a cluster c of a partition t. One of a single class has log-probability 0.

    Equivalent to, for row i and tree t::

        classes = (cluster[t] == cluster[t, target[i]]).nonzero().squeeze(1)
        z = weight[classes] @ hidden[i] + bias[t, classes]
        log_prob[i, t] = z.log_softmax(0)[classes == target[i]]

    Work O(N T W D) for groups of W classes. Sums are computed in float32 (float64 for float64) in a
    fixed order: the result is bitwise identical on every run, and so are the gradients, in which
    the trees add up in order. Kept for the backward pass: on a CPU the scores of the rows in their
    groups; on CUDA the logarithm of each row's sum, [N, T], and the scores are computed again.
    Neither is padded to the widest group.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: output embedding E, [V, D], dtype of ``hidden``. Under autocast all get its dtype on
            a GPU; on a CPU, whose sums and products are float32, hidden gets that of the weight.
        bias: biases of the classes in each tree, [T, V], dtype of ``weight``, or None.
        target: classes, [N] int64; a negative value marks an ignored row: log-probability 0 and no
            gradient.
        cluster: cluster of each class, [T, V] int32.
        order: the classes of each tree by cluster, [T, V] int32.
        begin: first place of each cluster in ``order``, and V, [T, C + 1] int32.
        max_width: number of classes of the largest group, or more.
        sparse: whether the gradients of weight and bias are sparse COO tensors with each visited
            class once, as with ``torch.nn.Embedding(sparse=True)``. Only in eager mode, and not
            under torch.func.

    Returns:
        Log-probabilities, [N, T], in nats, float32 (float64 for float64 hidden).

    Raises:
        RuntimeError: for a wrong shape, dtype or device and, on the CPU, an index out of range. On
            CUDA, where a check would have to wait for the device, a target out of range makes its
            row NaN.

    Example:
        >>> import torch
        >>> from hstree.ops import group_log_prob
        >>> cluster = torch.tensor([[0, 1, 0, 1, 1, 0]], dtype=torch.int32)
        >>> order = torch.tensor([[0, 2, 5, 1, 3, 4]], dtype=torch.int32)
        >>> begin = torch.tensor([[0, 3, 6]], dtype=torch.int32)
        >>> hidden, target = torch.zeros(4, 8), torch.tensor([0, 5, 2, -1])
        >>> group_log_prob(hidden, torch.randn(6, 8), None, target, cluster, order, begin,
        ...                max_width=3).exp().squeeze()
        tensor([0.3333, 0.3333, 0.3333, 1.0000])

    Source: Goodman, Classes for fast maximum entropy training, ICASSP 2001.
    """
    low = has_tensor_cores(weight)
    castable = (low or hidden.dtype != weight.dtype) and hidden.is_floating_point()
    if castable and autocasts(hidden.device):
        if low and weight.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(weight.device.type)
            weight, bias = cast(weight, dtype), None if bias is None else cast(bias, dtype)
        hidden = hidden.to(weight.dtype)
    run: Any = _op
    if (torch.is_grad_enabled() or is_transformed()) and not torch.compiler.is_compiling():
        run = _GroupLogProb.apply if in_torch_func() else _record
    if sparse and torch.is_grad_enabled() and not is_transformed():
        run = _record_sparse
        if torch.compiler.is_compiling():
            from hstree._uncompiled import uncompiled

            run = partial(uncompiled, run)
    log_prob: Tensor = run(hidden, weight, bias, target, cluster, order, begin, max_width)[0]
    return log_prob


def has_tensor_cores(weight: Tensor) -> bool:
    """Whether products of 16 bits are faster than those of float32. The kernels of the CPU compute
    both in float32, and a cast would cost O(V D) there for nothing."""
    return weight.is_cuda


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    cluster: Tensor,
    order: Tensor,
    begin: Tensor,
    max_width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, trees, dtype = hidden.shape[0], order.shape[0], sum_dtype(hidden.dtype)
    cuda = _kernels.of_cuda(hidden)
    return (
        hidden.new_empty((rows, trees), dtype=dtype),
        hidden.new_empty((rows * trees * (1 if cuda else max_width),), dtype=dtype),
        hidden.new_empty((trees, rows) if cuda else (0, 0), dtype=torch.int64),
    )


def _backward_fake(
    grad_log_prob: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    cluster: Tensor,
    order: Tensor,
    begin: Tensor,
    max_width: int,
    saved: Tensor,
    rows: Tensor,
    output_mask: Sequence[bool],
    sparse: bool,
) -> tuple[Tensor, ...]:
    visited: Any = 0
    biases: Any = 0
    shapes: list[Sequence[Any]] = [hidden.shape, weight.shape, order.shape]
    if sparse:
        context = torch.library.get_ctx()
        visited, biases = context.new_dynamic_size(), context.new_dynamic_size()
        shapes[1:] = [(visited, weight.shape[1]), (biases,)]
    return (
        *(
            hidden.new_empty(shape if want else (0,))
            for shape, want in zip(shapes, output_mask, strict=True)
        ),
        hidden.new_empty((1, visited), dtype=torch.int64),
        hidden.new_empty((2, biases), dtype=torch.int64),
    )


class _GroupLogProb(torch.autograd.Function):
    forward: Any = _op

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _log_prob, saved, rows = output
        *tensors, ctx.max_width = inputs
        ctx.mark_non_differentiable(saved, rows)
        ctx.set_materialize_grads(False)  # no zeros of the size of the scores
        ctx.save_for_backward(*tensors, saved, rows)

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, *_: Any) -> Any:
        return _gradients(ctx, grad_log_prob, False)


class _Sparse(_GroupLogProb):
    """Row-sparse gradients of weight and bias."""

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor | None, *_: Any) -> Any:
        return _gradients(ctx, grad_log_prob, True)


def _gradients(ctx: Any, grad_log_prob: Tensor | None, sparse: bool) -> Any:
    if grad_log_prob is None:
        return (None,) * 8
    *tensors, saved, rows = ctx.saved_tensors
    _hidden, weight, bias, *_tables = tensors
    _of_hidden, of_weight, of_bias = needed = ctx.needs_input_grad[:3]
    sparse = sparse and (of_weight or of_bias)  # on CUDA the indices wait for the device
    op = torch.ops.hstree.group_log_prob_backward.default
    arguments = *tensors, ctx.max_width, saved, rows, needed, sparse
    grad_hidden, grad_weight, grad_bias, index, bias_index = once(
        "group_log_prob", op, grad_log_prob, *arguments
    )
    # Classes are distinct and increase, also those of a tree's biases.
    if sparse and of_weight:
        grad_weight = sparse_gradient(weight, index, grad_weight, distinct=True)
    if sparse and of_bias:
        grad_bias = sparse_gradient(bias, bias_index, grad_bias, distinct=True)
    gradients = zip((grad_hidden, grad_weight, grad_bias), needed, strict=True)
    return *(gradient if need else None for gradient, need in gradients), *[None] * 5


torch.library.register_fake("hstree::group_log_prob", _fake)
torch.library.register_fake("hstree::group_log_prob_backward", _backward_fake)
_record = register_gradient(_op, _GroupLogProb)
_record_sparse = recorder(_Sparse)
