"""Log-probability of a class as a sum of log-sigmoids along its path:
``torch.ops.hstree.path_log_prob``, and ``torch.ops.hstree.forward``, which returns only its first
two results."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.ops._autograd import LIBRARY
from hstree.ops._tree_op import TreeOp


def _on_paths(
    score_of: Callable[[Tensor], Tensor], begin: Tensor, end: Tensor, path: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    # Paths shorter than the longest are padded with the first entry of the table, whose result is
    # masked.
    place = begin.unsqueeze(-1) + torch.arange(longest, device=begin.device)
    real = place < end.unsqueeze(-1)
    entry = path[place.where(real, 0)].long()
    score = score_of(entry >> 1)
    log_prob = F.logsigmoid(torch.where(entry & 1 == 1, score, -score))
    return log_prob.where(real, 0.0).sum(-1), score.where(real, 0.0)


_op = TreeOp("path_log_prob", _on_paths)
# torch.ops.hstree.forward has no gradients of its own: under torch.func it follows this op.
LIBRARY.impl("forward", lambda *inputs: _op.forward(*inputs)[:2], "FuncTorchDynamicLayerFrontMode")


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
    identical on every run. Forward mode holds the vectors of all nodes on the paths,
    [N, T, max_depth, S]. On the CPU, up to four blocks of memory of freed gradients and workspaces
    are kept and reused in later steps.

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
            row once, as with ``torch.nn.Embedding(sparse=True)``. Only in eager mode, and neither
            under torch.func nor in forward mode.
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
    return _op(
        sparse,
        hidden,
        weight,
        bias,
        target,
        path_offset,
        path,
        leaf_position,
        feature_index,
        max_depth,
        order,
    )
