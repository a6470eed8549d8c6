"""Draws from a mixture of trees: ``torch.ops.hstree.sample``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hstree.ops._gradient import register_no_gradient
from hstree.ops._tree_mixture import split_arguments


def sample(
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
        hidden, weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias: see
            :func:`hstree.ops.tree_topk`.
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
        >>> classes, log_prob = sample(torch.ones(1, 1), weight, None, None, None, None, None, None,
        ...                            torch.zeros(1, 1), None, node, edge, leaf_edge,
        ...                            torch.tensor([3]), n=1000)
        >>> bool((classes == 0).float().mean().sub(0.696).abs() < 0.05), log_prob.shape
        (True, torch.Size([1, 1000]))
    """
    vectors = weight, bias, wide_weight, wide_bias, leaf_weight, leaf_bias
    tables = feature_index, node, edge, leaf_edge
    classes, log_prob = torch.ops.hstree.sample(
        hidden, *vectors, root_log_prob, log_gate, *tables, seed, n, temperature
    )
    return classes, log_prob


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    mixture, (_seed, n, _temperature) = split_arguments(arguments)
    log_gate, shape = mixture.log_gate, (mixture.hidden.shape[0], n)
    return log_gate.new_empty(shape, dtype=torch.int64), log_gate.new_empty(shape)


torch.library.register_fake("hstree::sample", _fake)
register_no_gradient("sample", "TreeEnsemble.candidate_log_prob")
