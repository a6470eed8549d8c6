"""Where the loss of an ensemble of trees comes from: levels, trees, the mixture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.heads.trees import TreeEnsemble, level_log_probs
from hstree.models import LanguageModel, read_contexts

FloatArray = npt.NDArray[np.float64]

_LENGTH = 512  # steps that are computed together


@dataclass(frozen=True)
class TreeLoss:
    """Losses of an ensemble of T trees, of height L at most, over a text; in nats per token.

    Attributes:
        tokens: words that were predicted.
        parts: [T, L + 1], mean of -log P(child that holds the word) at the node of its path on each
            level, the root first; last the wide nodes below the root (leaf groups), on whatever
            level. A row's sum is the tree's loss.
        reached: [T, L + 1], share of the tokens whose path has such a node.
        uniform: loss of the mixture of the trees with equal weights, -log mean_t P_t.
        mixture: loss of the head, -log sum_t pi_t P_t.
        gate: [T], mean of pi.
        gate_perplexity: mean of exp(entropy of pi): how many trees the gate uses at a time.
    """

    tokens: int
    parts: FloatArray
    reached: FloatArray
    uniform: float
    mixture: float
    gate: FloatArray
    gate_perplexity: float

    @property
    def trees(self) -> FloatArray:
        """[T], the loss of each tree by itself."""
        return np.asarray(self.parts.sum(axis=1))

    @property
    def mean_tree(self) -> float:
        """Mean of the losses of the trees."""
        return float(self.trees.mean())


def check_tree_head(model: LanguageModel) -> TreeEnsemble:
    """The head of a model, if it is an ensemble of trees.

    Raises:
        ValueError: it is another one.
    """
    if not isinstance(model.head, TreeEnsemble):
        raise ValueError(f"model: expected a head of trees, got the head {model.head.name!r}")
    return model.head


@torch.no_grad()
def tree_loss(model: LanguageModel, tokens: Any) -> TreeLoss:
    """The loss of an ensemble of trees over a text, read as one stream, by level and by tree.

    Args:
        model: with a :class:`hstree.heads.TreeEnsemble`.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.

    Raises:
        ValueError: another head, or fewer than 2 tokens.
    """
    head = check_tree_head(model)
    height = max(tree.height for tree in head.trees)
    depth = torch.from_numpy(np.stack([tree.depth for tree in head.trees], axis=1).astype(np.int64))
    parts = torch.zeros(head.n_trees, height + 1, dtype=torch.float64)
    reached = torch.zeros_like(parts)
    gate = torch.zeros(head.n_trees, dtype=torch.float64)
    uniform, mixture, gates, n = 0.0, 0.0, 0.0, 0
    for hidden, target in read_contexts(model, tokens, length=_LENGTH):
        log_prob, group, log_gate = level_log_probs(head, hidden, target)
        log_prob, log_gate = log_prob.double().cpu(), log_gate.double().cpu()
        own, of_group = ~group.cpu(), group.cpu()
        on_path = torch.arange(height) < depth[target.cpu()][..., None]
        n += len(target)
        parts[:, :-1] -= (log_prob * own).sum(0)
        parts[:, -1] -= (log_prob * of_group).sum((0, 2))
        reached[:, :-1] += (on_path & own).sum(0)
        reached[:, -1] += of_group.any(2).sum(0)
        trees = log_prob.sum(2)
        uniform -= float((trees.logsumexp(1) - np.log(head.n_trees)).sum())
        mixture -= float((trees + log_gate).logsumexp(1).sum())
        pi = log_gate.exp()
        gate += pi.sum(0)
        gates += float((-(pi * log_gate).sum(1)).exp().sum())
    return TreeLoss(
        tokens=n,
        parts=(parts / n).numpy(),
        reached=(reached / n).numpy(),
        uniform=uniform / n,
        mixture=mixture / n,
        gate=(gate / n).numpy(),
        gate_perplexity=gates / n,
    )
