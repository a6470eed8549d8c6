"""The arguments that the ops which walk a mixture of trees share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class TreeMixture(NamedTuple):
    """The first arguments of :func:`hstree.ops.tree_topk`, :func:`hstree.ops.sample` and
    :func:`hstree.ops.candidate_log_prob`, in order."""

    hidden: Tensor  # [N, D]
    weight: Tensor | None  # [T, M, S], of the binary nodes
    bias: Tensor | None  # [T, M]
    wide_weight: Tensor | None  # [T, R, S], of the children of wide nodes
    wide_bias: Tensor | None  # [T, R]
    leaf_weight: Tensor | None  # [V, D], of the classes in leaf groups
    leaf_bias: Tensor | None  # [T, V]
    root_log_prob: Tensor | None  # [T, N, C], of the children of a wide root
    log_gate: Tensor  # [N, T]
    feature_index: Tensor | None  # [T, S]
    node: Tensor
    edge: Tensor
    leaf_edge: Tensor  # [T, V]


def split_arguments(arguments: Sequence[Any]) -> tuple[TreeMixture, Sequence[Any]]:
    """The mixture, and the arguments of one op that follow."""
    size = len(TreeMixture._fields)
    return TreeMixture(*arguments[:size]), arguments[size:]
