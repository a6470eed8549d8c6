"""What the references of :func:`hstree.ops.tree_topk` and :func:`hstree.ops.sample` share: the
scores of all nodes, and the log-probabilities of all classes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.tree_log_softmax import tree_log_softmax_reference


class Scores(NamedTuple):
    """Arguments of :func:`hstree.ops.tree_log_softmax`, after the temperature."""

    score: Tensor  # [T, R, N]
    root_begin: int
    class_score: Tensor | None  # [N, V]
    class_bias: Tensor | None  # [T, V]


def all_log_probs(*vectors: Any, temperature: float = 1.0) -> Tensor:
    """Log-probabilities [N, V] of all classes; arguments of :func:`hstree.ops.sample`."""
    log_gate, _, node, edge, leaf_edge = vectors[6:11]
    score, *rest = all_scores(*vectors, temperature=temperature)
    return tree_log_softmax_reference(score, log_gate, node, edge, leaf_edge.shape[1], *rest)


def all_scores(
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
    *,
    temperature: float = 1.0,
) -> Scores:
    dtype = log_gate.dtype
    trees = log_gate.shape[1]
    x = hidden.to(dtype).expand(trees, -1, -1)
    if feature_index is not None:
        x = torch.stack([x[t][:, feature_index[t].long()] for t in range(trees)])
    binary = root = x.new_zeros(trees, 0, len(hidden))
    if weight is not None:
        binary = weight.to(dtype) @ x.mT
        if bias is not None:
            binary = binary + bias.to(dtype).unsqueeze(2)
    class_score = None
    if class_weight is not None:
        class_score = hidden.to(dtype) @ class_weight.to(dtype).t() / temperature
        if class_bias is None:
            class_bias = class_score.new_zeros(leaf_edge.shape)
        class_bias = class_bias.to(dtype) / temperature
    if root_log_prob is not None:
        root = root_log_prob.mT
    score = torch.cat([binary / temperature, root], 1)
    return Scores(score, binary.shape[1], class_score, class_bias)
