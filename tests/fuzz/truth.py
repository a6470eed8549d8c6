"""Log-probabilities of trees and their gradients in float64 numpy, from the formulas.

``scores[kind]`` is an array [N, R] of one tree; see :mod:`fuzz.forests`. For groups R = V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.forests import BINARY, GROUP, KINDS, Forest, Node

Array = npt.NDArray[np.float64]


def log_sum_exp(x: Array, axis: int = -1) -> Array:
    most = x.max(axis, keepdims=True)
    most = np.where(np.isfinite(most), most, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        return (np.log(np.exp(x - most).sum(axis, keepdims=True)) + most).squeeze(axis)


def log_softmax(x: Array, axis: int = -1) -> Array:
    return x - np.expand_dims(log_sum_exp(x, axis), axis)


def log_sigmoid(x: Array) -> Array:
    return -np.logaddexp(0.0, -x)


def sigmoid(x: Array) -> Array:
    return np.exp(log_sigmoid(x))


def columns(node: Node) -> list[int]:
    """The columns of the scores of its kind that belong to a node."""
    if node.kind == GROUP:
        return [~child for child in node.children]
    width = 1 if node.kind == BINARY else len(node.children)
    return list(range(node.first_row, node.first_row + width))


def edge_log_prob(node: Node, scores: dict[int, Array]) -> Array:
    """Log-probability [N, children] of each child."""
    z = scores[node.kind][:, columns(node)]
    if node.kind == BINARY:
        return np.concatenate([log_sigmoid(z), log_sigmoid(-z)], 1)
    return log_softmax(z)


def class_log_prob(
    forest: Forest, t: int, scores: dict[int, Array], rows: int, kinds: Any = KINDS
) -> Array:
    """Sum [N, V] of the log-probabilities at the nodes of some kinds on the path of each class."""
    above = np.zeros((rows, len(forest.trees[t])))
    result = np.zeros((rows, forest.n_classes))
    for number, node in enumerate(forest.trees[t]):
        below = np.zeros((rows, len(node.children)))
        if node.kind in kinds:
            below = edge_log_prob(node, scores)
        for k, child in enumerate(node.children):
            value = above[:, number] + below[:, k]
            if child >= 0:
                above[:, child] = value
            else:
                result[:, ~child] = value
    return result


def score_gradient(
    forest: Forest, t: int, scores: dict[int, Array], grad: Array, kinds: Any = KINDS
) -> dict[int, Array]:
    """Gradients of the scores from those of :func:`class_log_prob`, [N, V]."""
    result = {kind: np.zeros_like(z) for kind, z in scores.items()}
    mass: dict[int, Array] = {}
    for number in reversed(range(len(forest.trees[t]))):
        node = forest.trees[t][number]
        below = np.stack(
            [mass[child] if child >= 0 else grad[:, ~child] for child in node.children], 1
        )
        mass[number] = below.sum(1)
        if node.kind not in kinds:
            continue
        z = scores[node.kind][:, columns(node)]
        if node.kind == BINARY:
            of_z = below[:, :1] * sigmoid(-z) - below[:, 1:] * sigmoid(z)
        else:
            of_z = below - np.exp(log_softmax(z)) * below.sum(1, keepdims=True)
        result[node.kind][:, columns(node)] += of_z
    return result


def mixture(log_probs: list[Array], log_gate: Array) -> tuple[Array, Array]:
    """log P [N, V] of a mixture of trees, and the share [N, V, T] of each tree in P."""
    joint = np.stack(log_probs, -1) + log_gate[:, None, :]
    log_prob = log_sum_exp(joint)
    finite = np.where(np.isfinite(log_prob), log_prob, 0.0)
    return log_prob, np.exp(joint - finite[..., None])
