"""Log-probability of a class within its leaf group, where all trees share one output embedding:
``torch.ops.hstree.leaf_log_prob``."""

from __future__ import annotations

from torch import Tensor

from hstree.ops._tree_op import TreeOp
from hstree.ops.wide_log_prob import log_prob_on_paths

_op = TreeOp("leaf_log_prob", log_prob_on_paths, shared=True)


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
    Holds at most the scores [N, T, max_width], on the CPU only those of the targets' groups;
    forward mode also holds their rows.

    Args:
        hidden: context vectors, [N, D]: float32, float64, bfloat16 or float16.
        weight: output embedding E of the classes, [V, D], dtype of ``hidden``; see
            :func:`hstree.ops.path_log_prob` for autocast.
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
    return _op(
        sparse,
        hidden,
        weight,
        bias,
        target,
        group_offset,
        group,
        leaf_position,
        leaf_class,
        max_width,
        order,
    )
