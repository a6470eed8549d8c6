"""The nodes above the leaf groups against a softmax: cross-entropy with the probabilities that the
softmax gives to the classes below their children."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._dtypes import sum_dtype
from hstree.heads.trees.blocks import BinaryBlock, Block, RootBlock, to_dtype_of, tree_features
from hstree.heads.trees.layout import Layout
from hstree.heads.trees.tree_layout import WIDE, TreeLayout
from hstree.heads.trees.vectors import NODE_BLOCKS
from hstree.ops import default_chunk_rows

if TYPE_CHECKING:
    from hstree.heads.softmax import Softmax


class _Edges:
    """The ranges of leaves below the edges above the leaf groups of a tree, from the left, as sums
    of the finest ranges between their bounds."""

    def __init__(self, layout: TreeLayout, device: torch.device) -> None:
        edges, bounds = layout.tree.edges(), {}
        for block in NODE_BLOCKS:
            edge = layout.edge[block.kind]
            columns = [edges.begin[edge], edges.end[edge]]
            if block is BinaryBlock:  # begin of the left leaves, begin and end of the right ones
                columns.append(edges.end[edge + 1])
            bounds[block.kind] = np.stack(columns)
        cuts = np.unique(np.concatenate([table.ravel() for table in bounds.values()]))
        self.widths = torch.from_numpy(np.diff(cuts)).to(device)
        self.bounds = {
            kind: torch.from_numpy(np.searchsorted(cuts, table)).to(device)
            for kind, table in bounds.items()
        }

    def masses(self, prob: Tensor, classes: Tensor) -> dict[int, list[Tensor]]:
        """For each kind of node the masses [R, N] below its children, at binary nodes those below
        the left and below the right ones.

        Args:
            prob: probabilities of the classes [V, N].
            classes: class of each leaf [V].
        """
        of_range = torch.segment_reduce(
            prob.index_select(0, classes), "sum", lengths=self.widths, axis=0
        )
        sums = F.pad(of_range.cumsum(0, dtype=torch.float64), (0, 0, 1, 0))
        return {
            kind: [(sums[end] - sums[begin]).to(prob.dtype) for begin, end in pairwise(table)]
            for kind, table in self.bounds.items()
        }


class SoftTargets:
    r"""A softmax as the target of the nodes above the leaf groups.

    Let :math:`q(c \mid h)` be the probability that the softmax gives to the classes below a child
    c. In each tree the loss of a context is

    .. math::
        -\sum_n \sum_{c \in \mathrm{children}(n)} q(c \mid h) \log P(c \mid n, h)

    Up to a constant this is the Kullback-Leibler divergence of the leaf groups, because the
    logarithms on a path add up to that of its leaf group.

    Args:
        layout: tables of the trees, with leaf groups.
        softmax: weight [V, D], with or without a bias.
    """

    def __init__(self, layout: Layout, softmax: nn.Linear | Softmax) -> None:
        self.layout, self.softmax = layout, softmax
        self.edges = [_Edges(of_tree, softmax.weight.device) for of_tree in layout.trees]

    def cross_entropy(
        self, blocks: Sequence[Block], hidden: Tensor, feature_index: Tensor | None
    ) -> Tensor:
        """The mean loss over contexts and trees, computed in chunks of contexts.

        Args:
            blocks: the nodes above the leaf groups.
            hidden: context vectors [N, D].
            feature_index: features that each tree reads, int32 [T, S]; None: all.
        """
        n_trees, losses = len(self.edges), []
        columns = 4 * len(self.softmax.weight)  # the tensors over all classes at a time
        for chunk in torch.split(hidden, default_chunk_rows(hidden, columns)):
            prob = self._probabilities(chunk)
            chunk = to_dtype_of(blocks, chunk)
            x = tree_features(chunk, feature_index, n_trees)
            scores = [block.scores(x) for block in blocks]
            for t, edges in enumerate(self.edges):
                masses = edges.masses(prob, self.layout.leaf_class[t])
                for block, score in zip(blocks, scores, strict=True):
                    mass = masses[block.kind]
                    of_tree = score[t][: len(mass[0])].to(prob.dtype)
                    losses.append(self._loss(block, t, of_tree, mass))
        return torch.stack(losses).sum() / (len(hidden) * n_trees)

    @torch.no_grad()
    def _probabilities(self, hidden: Tensor) -> Tensor:
        """The softmax [V, N]."""
        weight, bias = self.softmax.weight, self.softmax.bias
        logits = F.linear(hidden.to(weight.dtype), weight, bias)
        return logits.to(sum_dtype(logits.dtype)).softmax(1).t()

    def _loss(self, block: Block, t: int, score: Tensor, masses: list[Tensor]) -> Tensor:
        """Sum over nodes and contexts: scores [R, N] of a tree, and the masses of the children, or
        of the left and the right ones."""
        if isinstance(block, BinaryBlock):
            left, right = masses
            return -(left * F.logsigmoid(score) + right * F.logsigmoid(-score)).sum()
        (mass,) = masses
        if isinstance(block, RootBlock):
            return -(mass * score.log_softmax(0)).sum()
        layout = self.layout.trees[t]
        widths = torch.from_numpy(layout.tree.n_children[layout.kind == WIDE]).to(score.device)
        return _log_partition(score, mass, widths) - (mass * score).sum()


def _log_partition(score: Tensor, mass: Tensor, widths: Tensor) -> Tensor:
    """Sum over nodes and contexts of a node's mass times log sum_c exp(score_c), for nodes of
    ``widths`` [M] adjacent rows."""
    peak = torch.segment_reduce(score.detach(), "max", lengths=widths, axis=0)
    shifted = score - peak.repeat_interleave(widths, 0)
    total = torch.segment_reduce(shifted.exp(), "sum", lengths=widths, axis=0)
    of_node = torch.segment_reduce(mass, "sum", lengths=widths, axis=0)
    return (of_node * (total.log() + peak)).sum()
