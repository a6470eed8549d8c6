"""The nodes above the leaf groups, fitted to contexts: to the classes that follow them, or to the
probabilities that a softmax gives to the classes below their children."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hstree._numerics import sum_dtype
from hstree._progress import track
from hstree.heads.trees.layout import LEAF, WIDE, Layout, TreeLayout
from hstree.heads.trees.nodes import (
    NODE_BLOCKS,
    BinaryBlock,
    Block,
    LeafBlock,
    Nodes,
    RootBlock,
    to_dtype_of,
    tree_features,
)
from hstree.ops import default_chunk_rows

if TYPE_CHECKING:
    from hstree.heads.softmax import Softmax

CLASS_RATE = 0.01
SOFTMAX_RATE = 0.1  # times 1 / sqrt(D)


def fit_nodes(
    nodes: Nodes,
    layout: Layout,
    hidden: Tensor,
    target: Tensor | nn.Linear | Softmax,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float | None,
    seed: int,
) -> None:
    """See :meth:`hstree.heads.TreeEnsemble.fit_nodes`: hidden [N, D], and classes int64 [N] of
    :func:`hstree.ops.mark_targets` or a softmax."""
    parameters = list(nodes.own_parameters().values())
    exact = not isinstance(target, Tensor) and not layout.n_rows[LEAF]
    if not parameters or not len(hidden) or exact:
        return
    loss = _loss(nodes, layout, hidden, target)
    # In float32 even where the parameters have less: a step may be below their precision.
    fitted = [parameter.detach().to(sum_dtype(parameter.dtype)) for parameter in parameters]
    rate, scale = learning_rate or CLASS_RATE, 1.0
    if not isinstance(target, Tensor):
        rate = learning_rate or SOFTMAX_RATE / hidden.shape[1] ** 0.5
        scale = float(hidden.square().mean(dtype=torch.float32).sqrt()) or 1.0
    vectors, biases = ([value for value in fitted if value.dim() == n] for n in (3, 2))
    groups = [{"params": vectors, "lr": rate / scale}, {"params": biases, "lr": rate}]
    optimizer = torch.optim.Adam(groups)
    steps = epochs * -(-len(hidden) // batch_size)
    schedule = CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed % 2**63)
    orders = (torch.randperm(len(hidden), generator=generator) for _ in range(epochs))
    batches = (rows for order in orders for rows in torch.split(order, batch_size))
    for rows in track(batches, "fitting the nodes", steps):
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(rows.to(hidden.device)), parameters)
        for value, gradient in zip(fitted, gradients, strict=True):
            value.grad = gradient.to(value.dtype)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, fitted, strict=True):
                parameter.copy_(value)


def _loss(
    nodes: Nodes, layout: Layout, hidden: Tensor, target: Tensor | nn.Linear | Softmax
) -> Callable[[Tensor], Tensor]:
    """The loss of a batch, the mean over its contexts and the trees, as a function of their rows
    int64 [n] in ``hidden``."""

    def blocks() -> list[Block]:
        """Those above the leaf groups, with dense gradients."""
        above = (block for block in nodes(layout) if not isinstance(block, LeafBlock))
        return [replace(block, sparse=False) for block in above]

    if isinstance(target, Tensor):
        return lambda rows: _class_loss(blocks(), hidden[rows].detach(), target[rows])
    soft = SoftTargets(layout, target)
    return lambda rows: soft.cross_entropy(blocks(), hidden[rows].detach())


def _class_loss(blocks: Sequence[Block], hidden: Tensor, target: Tensor) -> Tensor:
    """-log P(leaf group of the target)."""
    hidden = to_dtype_of(blocks, hidden)
    log_prob = [block.target_log_prob(hidden, target, None) for block in blocks]
    return -sum(log_prob[1:], log_prob[0]).mean()


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

    def cross_entropy(self, blocks: Sequence[Block], hidden: Tensor) -> Tensor:
        """The mean loss over contexts and trees, computed in chunks of contexts.

        Args:
            blocks: the nodes above the leaf groups.
            hidden: context vectors [N, D].
        """
        n_trees, losses = len(self.edges), []
        columns = 4 * len(self.softmax.weight)  # the tensors over all classes at a time
        for chunk in torch.split(hidden, default_chunk_rows(hidden, columns)):
            prob = self._probabilities(chunk)
            chunk = to_dtype_of(blocks, chunk)
            x = tree_features(chunk, self.layout.feature_index, n_trees)
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
