"""Where the loss comes from: levels, trees and mixture of an ensemble; frequency of the words."""

from __future__ import annotations

import itertools
import math
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
        levels: names of the L + 1 parts.
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
    levels: tuple[str, ...]
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


@dataclass(frozen=True)
class FrequencyBin:
    """Words of similar frequency in the training text.

    Attributes:
        first, last: their ranks by frequency, the most frequent word 1.
        most, least: occurrences of the first and of the last in the training text.
        tokens: occurrences of all of them in the text that was read.
        loss: sum of -log P over these, in nats.
    """

    first: int
    last: int
    most: int
    least: int
    tokens: int
    loss: float

    @property
    def mean(self) -> float:
        """Loss in nats per token of the bin; nan without one."""
        return self.loss / self.tokens if self.tokens else math.nan

    @property
    def label(self) -> str:
        """The ranks in words."""
        return f"{self.first:,}-{self.last:,}" if self.last > self.first else f"{self.first:,}"


def tree_head(model: LanguageModel) -> TreeEnsemble:
    """The head of a model; ValueError if it is no ensemble of trees."""
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
    head = tree_head(model)
    height = max(tree.height for tree in head.trees)
    depth = torch.from_numpy(np.stack([tree.depth for tree in head.trees], axis=1).astype(np.int64))
    parts = torch.zeros(head.n_trees, height + 1, dtype=torch.float64)
    reached, gate = torch.zeros_like(parts), torch.zeros_like(parts[:, 0])
    uniform, mixture, gate_perplexity = torch.zeros(3, dtype=torch.float64)
    for hidden, target in read_contexts(model, tokens, length=_LENGTH):
        found = level_log_probs(head, hidden, target)
        log_prob, log_gate = found.log_prob.double().cpu(), found.log_gate.double().cpu()
        group = found.group.cpu()
        own = (torch.arange(height) < depth[target.cpu()][..., None]) & ~group  # [N, T, L]
        parts[:, :-1] -= (log_prob * own).sum(0)
        parts[:, -1] -= (log_prob * group).sum((0, 2))
        reached[:, :-1] += own.sum(0)
        reached[:, -1] += group.any(2).sum(0)
        trees = log_prob.sum(2)
        uniform -= (trees - math.log(head.n_trees)).logsumexp(1).sum()
        mixture -= (trees + log_gate).logsumexp(1).sum()
        gate += log_gate.exp().sum(0)
        gate_perplexity += (-(log_gate.exp() * log_gate).sum(1)).exp().sum()
    n = len(tokens) - 1
    return TreeLoss(
        tokens=n,
        levels=("root", *(f"level {level}" for level in range(2, height + 1)), "leaf groups"),
        parts=(parts / n).numpy(),
        reached=(reached / n).numpy(),
        uniform=float(uniform / n),
        mixture=float(mixture / n),
        gate=(gate / n).numpy(),
        gate_perplexity=float(gate_perplexity / n),
    )


@torch.no_grad()
def frequency_loss(
    model: LanguageModel, tokens: Any, frequencies: npt.ArrayLike
) -> tuple[FrequencyBin, ...]:
    """The loss of a model with any head over a text, read as one stream, by rank of the word's
    frequency: 1-10, 11-30, 31-100, 101-300 and so on to V. The bins together hold the whole loss.

    Args:
        model: of V classes.
        tokens: numpy ids [n], n >= 2; every token but the first is a target.
        frequencies: int [V], occurrences in the training text; classes of equal frequency are
            ranked by their number.

    Raises:
        ValueError: frequencies of another number of classes, or fewer than 2 tokens.
    """
    training, n_classes = np.asarray(frequencies, np.int64), model.head.n_classes
    if training.shape != (n_classes,):
        raise ValueError(
            f"frequencies: expected {n_classes}, one for each class, got {training.shape}"
        )
    counts, losses = np.zeros(n_classes, np.int64), np.zeros(n_classes)
    for hidden, target in read_contexts(model, tokens):
        log_prob = model.head(hidden, target).output.double().cpu().numpy()
        classes = target.cpu().numpy()
        counts += np.bincount(classes, minlength=n_classes)
        losses -= np.bincount(classes, log_prob, minlength=n_classes)
    order = np.argsort(-training, kind="stable")
    limits = (factor * 10**power for power in itertools.count(1) for factor in (1, 3))
    inner = itertools.takewhile(lambda limit: limit < n_classes, limits)
    return tuple(
        FrequencyBin(
            first=begin + 1,
            last=end,
            most=int(training[order[begin]]),
            least=int(training[order[end - 1]]),
            tokens=int(counts[order[begin:end]].sum()),
            loss=float(losses[order[begin:end]].sum()),
        )
        for begin, end in itertools.pairwise([0, *inner, n_classes])
    )
