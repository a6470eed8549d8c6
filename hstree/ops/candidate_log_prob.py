"""Log-probabilities of some classes of each row under a mixture of trees:
``torch.ops.hstree.candidate_log_prob``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._gradient import register_no_gradient
from hstree.ops._tree_mixture import split_arguments


def candidate_log_prob(
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
    candidates: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    r"""Log-probabilities of K classes of each row under a mixture of T trees.

    .. math::
        \log P(y \mid x) = \log \sum_t \exp\Bigl(\gamma_t + \sum_{e \in \mathrm{path}_t(y)} \log
        P_t(e \mid x)\Bigr)

    On the CPU a node on the paths of several candidates of a row is scored once; on CUDA once for
    each of them, which suits few candidates. Deterministic, for any number of threads. Not
    differentiable: :meth:`hstree.heads.Head.candidate_log_prob` is. No synchronization on
    CUDA.

    Args:
        hidden, weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias: see
            :func:`hstree.ops.tree_topk`.
        root_log_prob, log_gate, feature_index, node, edge, leaf_edge: see
            :func:`hstree.ops.sample`.
        candidates: classes, int64 [N, K]; -1: log-probability 0.
        temperature: see :func:`hstree.ops.sample`.

    Returns:
        Log-probabilities, [N, K], in nats, dtype of ``log_gate``.

    Raises:
        RuntimeError: for a wrong shape, dtype, device or number, and on the CPU for a candidate out
            of range, or tables whose paths from the candidates to the root are not those of a tree,
            as of a table with a cycle. On CUDA these give NaN or a wrong number.

    Example:
        >>> import torch
        >>> from hstree.ops import candidate_log_prob
        >>> node = torch.tensor([[[0, 0, 0, 2, -1], [0, 1, 2, 2, 0]]], dtype=torch.int32)
        >>> edge = torch.tensor([[[0, 1], [0, ~2], [1, ~0], [1, ~1]]], dtype=torch.int32)
        >>> leaf_edge = torch.tensor([[2, 3, 1]], dtype=torch.int32)
        >>> weight = torch.tensor([[[1.0], [3.0]]])
        >>> candidate_log_prob(torch.ones(1, 1), weight, None, None, None, None, None, None,
        ...                    torch.zeros(1, 1), None, node, edge, leaf_edge,
        ...                    torch.tensor([[2, 0]])).exp()
        tensor([[0.2689, 0.6964]])
    """
    vectors = weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias
    tables = feature_index, node, edge, leaf_edge
    log_prob: Tensor = torch.ops.hstree.candidate_log_prob(
        hidden, *vectors, root_log_prob, log_gate, *tables, candidates, temperature
    )
    return log_prob


def _fake(*arguments: Any) -> Tensor:
    mixture, (candidates, _temperature) = split_arguments(arguments)
    return mixture.log_gate.new_empty(candidates.shape)


torch.library.register_fake("hstree::candidate_log_prob", _fake)
register_no_gradient("candidate_log_prob", "TreeEnsemble.candidate_log_prob")
