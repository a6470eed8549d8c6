"""The ops on the paths of the targets: ``torch.ops.hstree.path_log_prob``, ``wide_log_prob`` and
``leaf_log_prob``, and ``torch.ops.hstree.forward``, which returns the first two results of
``path_log_prob``.

All have the signature ``op(hidden, weight, bias, target, offset, path, leaf_position, index,
longest, order) -> (log_prob, score, order, plan)``. ``index`` is ``leaf_class`` in the leaf op and
``feature_index`` in the others. ``score`` is [N, T, longest]. ``order`` comes from
:func:`hstree.ops.leaf_order` and is empty if it was given. ``plan`` is internal to the kernels and
kept for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hstree._numerics import autocasts, is_transformed, sum_dtype
from hstree.ops._gradient import once, register_gradient
from hstree.ops._row_sparse import cast, sparse_gradient

Operator = Callable[..., Any]


class TreeOp:
    """An op of the library ``hstree`` by name; registers its fake kernels and gradients.

    Args:
        name: name of the op.
        shared: whether all trees read the rows of one weight [V, D], through ``leaf_class``.
    """

    def __init__(self, name: str, *, shared: bool = False) -> None:
        self.name = name
        self.shared = shared
        backward = f"{name}_backward"
        self.forward: Operator = getattr(torch.ops.hstree, name).default
        self.backward: Operator = getattr(torch.ops.hstree, backward).default
        torch.library.register_fake(f"hstree::{name}", self._forward_fake)
        torch.library.register_fake(f"hstree::{backward}", self._backward_fake)
        function: Any = type(
            name,
            (torch.autograd.Function,),
            {
                "forward": self.forward,
                "setup_context": staticmethod(_save_for_backward),
                "backward": staticmethod(self._dense_gradient),
            },
        )
        self.call = register_gradient(function)

    def __call__(self, sparse: bool, *inputs: Any) -> Tensor:
        """log_prob [N, T]."""
        if sparse and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                from hstree._uncompiled import uncompiled

                uncompiled_log_prob: Tensor = uncompiled(apply_sparse, self, *inputs)
                return uncompiled_log_prob
            return apply_sparse(self, *inputs)
        log_prob: Tensor = self.call(*self.autocast(*inputs))[0]
        return log_prob

    def autocast(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
    ) -> tuple[Any, ...]:
        """The arguments in the dtype that the kernels compute in under autocast."""
        if autocasts(hidden.device) and hidden.is_floating_point():
            if self.shared and has_tensor_cores(weight) and weight.dtype != torch.float64:
                low = torch.get_autocast_dtype(weight.device.type)
                weight, bias = cast(weight, low), None if bias is None else cast(bias, low)
            hidden = hidden.to(weight.dtype)
        return hidden, weight, bias, *rest

    def _dense_gradient(self, ctx: Any, grad_log_prob: Tensor | None, *_: Any) -> Any:
        if grad_log_prob is None:
            return (None,) * 10
        needed = ctx.needs_input_grad[:3]
        gradients = once(self.name, self.backward, grad_log_prob, *ctx.saved_tensors, needed, False)
        wanted = zip(gradients, needed, strict=False)
        return *(gradient if need else None for gradient, need in wanted), *[None] * 7

    def _forward_fake(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        offset: Tensor,
        path: Tensor,
        leaf_position: Tensor,
        index: Tensor | None,
        longest: int,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dimensions = 2 if self.shared else 3
        if hidden.dim() != 2:
            raise RuntimeError(f"hidden: expected shape [N, D], got {tuple(hidden.shape)}")
        if weight.dim() != dimensions:
            number = "two" if self.shared else "three"
            raise RuntimeError(
                f"weight: expected {number} dimensions, got shape {tuple(weight.shape)}"
            )
        if hidden.dtype != weight.dtype:
            raise RuntimeError(f"weight: expected dtype {hidden.dtype}, got {weight.dtype}")
        rows, trees = hidden.shape[0], (leaf_position if self.shared else weight).shape[0]
        dtype = sum_dtype(hidden.dtype)
        return (
            hidden.new_empty((rows, trees), dtype=dtype),
            hidden.new_empty((rows, trees, longest), dtype=dtype),
            hidden.new_empty((trees, rows) if order is None else (0, 0), dtype=torch.int64),
            hidden.new_empty((_plan_size(hidden, trees),), dtype=torch.int32),
        )

    def _backward_fake(
        self,
        grad_log_prob: Tensor,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        offset: Tensor,
        path: Tensor,
        leaf_position: Tensor,
        index: Tensor | None,
        score: Tensor,
        order: Tensor | None,
        plan: Tensor | None,
        output_mask: Sequence[bool],
        sparse: bool,
    ) -> tuple[Tensor, ...]:
        of_bias = leaf_position.shape if self.shared else weight.shape[:2]
        shapes: list[Sequence[Any]] = [hidden.shape, weight.shape, of_bias]
        rows: Any = 0
        biases: Any = 0
        if sparse:
            context = torch.library.get_ctx()
            rows = biases = context.new_dynamic_size()
            if self.shared:
                biases = context.new_dynamic_size()
            shapes[1:] = [(rows, weight.shape[-1]), (biases,)]
        indices = [(1, rows), (2, biases)] if self.shared else [(2, rows), (0,)]
        return (
            *(
                hidden.new_empty(shape if want else (0,))
                for shape, want in zip(shapes, output_mask, strict=True)
            ),
            *(hidden.new_empty(shape, dtype=torch.int64) for shape in indices),
        )


def _save(ctx: Any, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> None:
    """Save the arguments of the backward op from hidden to plan."""
    hidden, weight, _bias, *tables, _longest, given = inputs
    _log_prob, score, order, plan = outputs
    kept = (score, order if given is None else given, plan if has_plan(hidden) else None)
    ctx.save_for_backward(hidden, weight, *tables, *kept)


def has_plan(hidden: Tensor) -> bool:
    """Whether the kernels for the device of hidden work by a plan: an order of rows or classes."""
    return hidden.device.type == "cuda"


def has_tensor_cores(weight: Tensor) -> bool:
    """Whether products of 16 bits are faster than those of float32. The kernels of the CPU compute
    both in float32, and a cast would cost O(V D) there for nothing."""
    return weight.is_cuda


def _plan_size(hidden: Tensor, trees: Any) -> Any:
    return 4 * trees * hidden.shape[0] + 1 + trees if has_plan(hidden) else 0


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # no zeros [N, T, longest]
    _save(ctx, inputs, output)


class _SparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: TreeOp, *inputs: Any) -> Tensor:
        output = op.forward(*inputs)
        _hidden, _weight, bias, *_ = inputs
        ctx.op, ctx.bias = op, bias
        _save(ctx, inputs, output)
        log_prob: Tensor = output[0]
        return log_prob

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor) -> Any:
        _, *needed = ctx.needs_input_grad[:4]
        sparse = any(needed[1:])  # on CUDA the index waits for the device
        grad_hidden, rows, bias_rows, index, bias_index = once(
            ctx.op.name, ctx.op.backward, grad_log_prob, *ctx.saved_tensors, needed, sparse
        )
        _hidden, weight, *_ = ctx.saved_tensors
        shared = ctx.op.shared
        of_hidden, of_weight, of_bias = needed
        grad_weight = grad_bias = None
        # The classes of a shared weight are distinct and increase, also those of a tree's biases.
        if of_weight:
            grad_weight = sparse_gradient(weight, index, rows, distinct=shared)
        if of_bias:
            of = bias_index if shared else index
            grad_bias = sparse_gradient(ctx.bias, of, bias_rows, distinct=shared)
        return None, grad_hidden if of_hidden else None, grad_weight, grad_bias, *[None] * 7


def apply_sparse(op: TreeOp, *inputs: Any) -> Tensor:
    """log_prob [N, T] with row-sparse gradients, or dense ones under a transform."""
    inputs = op.autocast(*inputs)
    if is_transformed():
        dense: Tensor = op.call(*inputs)[0]
        return dense
    log_prob: Tensor = _SparseGradient.apply(op, *inputs)  # type: ignore[no-untyped-call]
    return log_prob


_path_op = TreeOp("path_log_prob")
_wide_op = TreeOp("wide_log_prob")
_leaf_op = TreeOp("leaf_log_prob", shared=True)


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
    order: Tensor | None = None,
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
        order: result of :func:`hstree.ops.leaf_order` for ``target`` and ``leaf_position``, which
            several ops on the same trees can share; None: it is computed. Its values are not
            checked on CUDA.

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
    tables = path_offset, path, leaf_position, feature_index
    return _path_op(sparse, hidden, weight, bias, target, *tables, max_depth, order)


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

    Deterministic. Holds at most the scores [N, T, max_width].

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
    tables = wide_offset, wide_path, leaf_position, feature_index
    return _wide_op(sparse, hidden, weight, bias, target, *tables, max_width, order)


def leaf_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    group_offset: Tensor,
    group: Tensor,
    leaf_position: Tensor,
    leaf_class: Tensor,
    *,
    max_width: int,
    sparse: bool = False,
    order: Tensor | None = None,
) -> Tensor:
    r"""Log-probability of each row's target within its leaf group, in each of T trees that share
    one output embedding.

    .. math::
        \log p_{it} = E_y \cdot h_i + b_{ty} - \log \sum_{v \in G_t(y)}
        \exp(E_v \cdot h_i + b_{tv}), \qquad y = y_i

    :math:`G_t(y)` are the classes of the group of y in tree t, a node whose children are all
    classes. The op is :func:`hstree.ops.wide_log_prob` for weights that the trees share: row r of
    tree t is ``weight[leaf_class[t, r]]`` with ``bias[t, leaf_class[t, r]]``.

    Equivalent to, for row i and tree t::

        begin, end = group_offset[t, target[i]], group_offset[t, target[i] + 1]
        for first_leaf, width, child in group[begin:end]:
            classes = leaf_class[t, first_leaf : first_leaf + width]
            z = weight[classes] @ hidden[i] + bias[t, classes]
            log_prob[i, t] += z.log_softmax(0)[child]

    Deterministic: the trees add up in the gradient of the weight in float32 (float64 for float64
    hidden), in order.
    Holds at most the scores [N, T, max_width], on the CPU only those of the targets' groups.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: output embedding E of the classes, [V, D], dtype of ``hidden``. Under autocast all
            get its dtype on a GPU; on a CPU, whose sums and products are float32, as in
            :func:`hstree.ops.path_log_prob`.
        bias: biases of the classes in each tree, [T, V], dtype of ``weight``, or None.
        target: classes, [N] int64; a negative value marks an ignored row: log-probability 0 and no
            gradient.
        group_offset: begin and end of the groups of each class in ``group``, [T, V + 1] int64. A
            class without a group in a tree has log-probability 0 there.
        group: leaf groups of the classes, as (first_leaf, width, child), [P, 3] int32.
        leaf_position: rank of each class's leaf from the left, [T, V] int32.
        leaf_class: class of each leaf from the left, [T, V] int32.
        max_width: largest width of a group, at most 2**20.
        sparse: as in :func:`hstree.ops.path_log_prob`. The rows of the
            gradient of the weight are distinct and increase.
        order: as in :func:`hstree.ops.path_log_prob`.

    Returns:
        Log-probabilities, [N, T], in nats, float32 (float64 for float64 hidden).

    Raises:
        RuntimeError: as in :func:`hstree.ops.path_log_prob`.

    Example:
        >>> import torch, hstree
        >>> from hstree.ops import leaf_log_prob
        >>> tree = hstree.trees.Tree.from_nested(((0, 1, 2), (3, 4, 5)))
        >>> leaf_class = torch.tensor(tree.order)[None]
        >>> leaf_position = torch.tensor(tree.tables().leaf_position)[None]
        >>> group = torch.tensor([[3 * (y // 3), 3, y % 3] for y in range(6)], dtype=torch.int32)
        >>> hidden, weight = torch.randn(4, 8), torch.randn(6, 8)
        >>> target = torch.tensor([0, 5, 2, -1])
        >>> leaf_log_prob(hidden, weight, None, target, torch.arange(7)[None], group,
        ...               leaf_position, leaf_class, max_width=3).shape
        torch.Size([4, 1])
    """
    tables = group_offset, group, leaf_position, leaf_class
    return _leaf_op(sparse, hidden, weight, bias, target, *tables, max_width, order)
