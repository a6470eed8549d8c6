"""Parts of the loss: by level, tree and mixture of an ensemble, and by frequency of the words."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hstree.heads.trees import TreeEnsemble, level_log_probs
from hstree.lm.models import LanguageModel, read_contexts

FloatArray = npt.NDArray[np.float64]

_LENGTH = 512  # number of steps that are computed together


@dataclass(frozen=True)
class TreeLoss:
    """Losses of an ensemble of T trees, of height at most L, over a text, in nats per token.

    Attributes:
        tokens: number of predicted words.
        levels: names of the L + 1 parts.
        parts: mean of -log P(child that contains the word) at each level of the path, from the root
            down; the last column is for wide nodes below the root (leaf groups), at any level. [T,
            L + 1]; the sum of a row is the loss of the tree.
        reached: share of the tokens whose path has such a node, [T, L + 1].
        uniform: loss of the mixture of the trees with equal weights, -log mean_t P_t.
        mixture: loss of the head, -log sum_t pi_t P_t.
        gate: mean of pi, [T].
        gate_perplexity: mean of exp(entropy of pi), the effective number of trees that the gate
            uses.
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
        """The loss of each single tree, [T]."""
        return np.asarray(self.parts.sum(axis=1))


@dataclass(frozen=True)
class FrequencyBin:
    """Words of similar frequency in the training text.

    Attributes:
        first, last: their ranks by frequency; 1 is the most frequent word.
        most, least: occurrences of the first and the last word in the training text.
        tokens: occurrences of all of them in the evaluated text.
        loss: sum of -log P over these occurrences, in nats.
    """

    first: int
    last: int
    most: int
    least: int
    tokens: int
    loss: float

    @property
    def mean(self) -> float:
        """Loss in nats per token of the bin; nan if it has none."""
        return self.loss / self.tokens if self.tokens else math.nan

    @property
    def label(self) -> str:
        """The ranks as text."""
        return f"{self.first:,}-{self.last:,}" if self.last > self.first else f"{self.first:,}"


def tree_head(model: LanguageModel) -> TreeEnsemble:
    if not isinstance(model.head, TreeEnsemble):
        raise ValueError(f"model: expected a head of trees, got the head {model.head.name!r}")
    return model.head


@torch.no_grad()
def tree_loss(model: LanguageModel, tokens: Any) -> TreeLoss:
    """Compute the loss of an ensemble of trees over a text, read as one stream, by level and tree.

    Args:
        model: model with a :class:`hstree.heads.TreeEnsemble`.
        tokens: numpy array of class ids, [n], n >= 2; every token except the first is a target.

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
    """Compute the loss of a model with any head over a text, read as one stream, by frequency rank
    of the word: 1-10, 11-30, 31-100, 101-300 and so on to V. The bins add up to the whole loss.

    Args:
        model: language model over V classes.
        tokens: numpy array of class ids, [n], n >= 2; every token except the first is a target.
        frequencies: occurrences of the classes in the training text, int [V]; classes of equal
            frequency are ranked by their number.

    Raises:
        ValueError: ``frequencies`` has another number of classes, or there are fewer than 2 tokens.
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
