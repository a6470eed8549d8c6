"""Blocks: the nodes of one kind in all trees, with their vectors and biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree._products import batched_scores, is_cast, linear_scores
from hstree.heads.trees.layout import Layout
from hstree.heads.trees.tree_layout import BINARY, LEAF, ROOT, WIDE
from hstree.ops.feature_gather import feature_gather
from hstree.ops.leaf_log_prob import leaf_log_prob
from hstree.ops.path_log_prob import path_log_prob
from hstree.ops.target_log_softmax import target_log_softmax
from hstree.ops.wide_log_prob import wide_log_prob

FloatArray = npt.NDArray[np.float64]
Values = TypeVar("Values", FloatArray, Tensor)


@dataclass
class Block:
    """The nodes of one kind in T trees, with their parameters at one step.

    Attributes:
        weight: vectors of the nodes [T, R, S], R in the largest tree; see
            :class:`hstree.heads.trees.tree_layout.TreeLayout`.
        bias: biases of the nodes [T, R].
        layout: tables of the trees.
        feature_index: features that each tree reads, int32 [T, S]; None: all.
        sparse: whether the gradients of the target's log-probability are row-sparse.
    """

    weight: Tensor
    bias: Tensor
    layout: Layout
    feature_index: Tensor | None
    sparse: bool

    kind: ClassVar[int]
    prefix: ClassVar[str]
    """Prefix of the names of its parameters."""
    weight_name: ClassVar[str]
    """Name of the parameter that its vectors are read from, where each node has its own."""
    visits_rows: ClassVar[bool]
    """Whether a step reads only the vectors on the paths of the targets, with the contexts sorted
    by leaf."""

    @staticmethod
    def of_edges(values: Values, edge: npt.NDArray[np.int64]) -> Values:
        """Values of the vectors, from values [E, ...] of the edges of a tree."""
        return values[edge]

    def features(self, hidden: Tensor, t: int) -> Tensor:
        """The features [..., S] of hidden [..., D] that its nodes read in tree t."""
        return hidden if self.feature_index is None else hidden[..., self.feature_index[t].long()]

    def rows(self, t: int, row: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors [..., S] and biases [...] of the rows, int64 [...], in tree t."""
        return self.weight[t, row], self.bias[t, row]

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        """Sum of log P(child that holds the target) over these nodes of its path, [N, T].

        Args:
            hidden: context vectors [N, D].
            target: int64 [N], from :func:`hstree.ops.mark_targets`.
            order: result of :func:`hstree.ops.leaf_order` if several blocks share it, else None.
        """
        raise NotImplementedError

    def scores(self, x: Tensor) -> Tensor:
        """w . x + b of all vectors, [T, R, N], in the dtype of sums.

        Args:
            x: the features of each tree, [T, N, S].
        """
        return batched_scores(x, self.weight, self.bias)


class BinaryBlock(Block):
    """log sigmoid(z) for the left child and log sigmoid(-z) for the right, z = w . x + b."""

    kind, prefix, weight_name, visits_rows = BINARY, "", "weight", True

    @staticmethod
    def of_edges(values: Values, edge: npt.NDArray[np.int64]) -> Values:
        """Value of the left child minus value of the right child."""
        return values[edge] - values[edge + 1]

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        return path_log_prob(
            hidden,
            self.weight,
            self.bias,
            target,
            self.layout.path_offset,
            self.layout.path,
            self.layout.leaf_position,
            self.feature_index,
            max_depth=self.layout.max_depth,
            sparse=self.sparse,
            order=order,
        )


class WideBlock(Block):
    """log-softmax of w . x + b over the children of a node."""

    kind, prefix, weight_name, visits_rows = WIDE, "wide_", "wide_weight", True

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        return wide_log_prob(
            hidden,
            self.weight,
            self.bias,
            target,
            self.layout.wide_offset,
            self.layout.wide_path,
            self.layout.leaf_position,
            self.feature_index,
            max_width=self.layout.max_width,
            sparse=self.sparse,
            order=order,
        )


class LeafBlock(Block):
    """log-softmax of E_y . h + b_ty over the classes y of a leaf group, with the output embedding E
    of all trees: weight [V, D], bias [T, V] and all features."""

    kind, prefix, weight_name, visits_rows = LEAF, "leaf_", "output_embedding", True

    def rows(self, t: int, row: Tensor) -> tuple[Tensor, Tensor]:
        classes = self.layout.leaf_class[t, row].long()
        return self.weight[classes], self.bias[t, classes]

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        return leaf_log_prob(
            hidden,
            self.weight,
            self.bias,
            target,
            self.layout.group_offset,
            self.layout.group,
            self.layout.leaf_position,
            self.layout.leaf_class,
            max_width=self.layout.max_group,
            sparse=self.sparse,
            order=order,
        )

    def class_scores(self, hidden: Tensor) -> Tensor:
        """E_y . h of all classes, [N, V], which all trees share, in the dtype of sums; on CUDA with
        adjacent rows, as the kernel reads them."""
        if hidden.device.type == "cuda":
            return torch.mm(self.weight, hidden.t()).t().to(sum_dtype(hidden.dtype))
        return linear_scores(hidden, self.weight)


class RootBlock(Block):
    """A :class:`WideBlock` of wide roots, which all targets visit: one dense product."""

    kind, prefix, weight_name, visits_rows = ROOT, "root_", "root_weight", False

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        child = self.layout.root_child[:, target].long()
        logits = self.logits(hidden)
        by_tree = self.feature_index is not None  # the memory layout of the logits
        if not by_tree:
            logits, child = logits.transpose(0, 1), child.t()
        log_prob = target_log_softmax(logits.flatten(0, 1), child.flatten()).view_as(child)
        return log_prob.t() if by_tree else log_prob

    def candidate_log_prob(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """log P(child that holds each candidate), [N, K, T]: hidden [N, D], candidates [N, K] from
        :func:`hstree.ops.mark_targets`, whose marks have any child."""
        child = self.layout.root_child[:, candidates].long()
        log_prob = self.log_prob(hidden, temperature)
        return log_prob.gather(2, child.clamp(0, log_prob.shape[2] - 1)).permute(1, 2, 0)

    def log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of all children, [T, N, R], with the logits divided by the
        temperature: hidden [N, D]."""
        return tempered(self.logits(hidden), temperature).log_softmax(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """w . x + b of all vectors, [T, N, R], in the dtype of sums: hidden [N, D]."""
        n_trees, n_children, _ = self.weight.shape
        if self.feature_index is None:
            rows, bias = self.weight.flatten(0, 1), self.bias.flatten()
            logits = linear_scores(hidden.to(rows.dtype), rows, bias.to(rows.dtype))
            return logits.view(-1, n_trees, n_children).transpose(0, 1)
        x = tree_features(hidden.to(self.weight.dtype), self.feature_index, n_trees)
        weight = self.weight.float() if is_cast(self.weight) else self.weight
        x, bias = x.to(weight.dtype), self.bias.to(weight.dtype)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT).to(sum_dtype(x.dtype))


BLOCKS: tuple[type[Block], ...] = (BinaryBlock, WideBlock, LeafBlock, RootBlock)
"""The block types, indexed by kind."""


def to_dtype_of(blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """``hidden`` in the dtype of the blocks' vectors."""
    return hidden.to(blocks[0].weight.dtype) if blocks else hidden


def tempered(scores: Tensor, temperature: float) -> Tensor:
    """The scores divided by the temperature, but for a term that all of a row share."""
    if temperature == 1.0:
        return scores
    return (scores - scores.detach().amax(-1, keepdim=True)) / temperature


def tree_features(hidden: Tensor, feature_index: Tensor | None, n_trees: int) -> Tensor:
    """Features [T, N, S] that each tree reads of hidden [N, D]."""
    if feature_index is None:
        return hidden.expand(n_trees, -1, -1)
    return feature_gather(hidden, feature_index).transpose(0, 1)


def log_odds(layout: Layout, frequencies: FloatArray) -> list[FloatArray]:
    """Biases [T, R] of each kind of node: with zero vectors they give the distribution of the
    frequencies [V].

    log(mass of the left subtree / mass of the right subtree) for a binary node, log(mass of the
    child / mass of the node) for a child of a wide node, and log(mass of the class / mass of all)
    in leaf groups, [T, V] by class. There only differences within a group matter, and this is the
    same in other trees.
    """
    biases = [np.zeros((len(layout.trees), rows)) for rows in layout.n_rows]
    if layout.n_rows[LEAF]:
        biases[LEAF][:] = np.log(frequencies) - np.log(frequencies.sum())
    for t, of_tree in enumerate(layout.trees):
        tree, node = of_tree.tree, of_tree.tree.edges().node
        mass = np.log(tree.edge_masses(frequencies))
        share = mass - np.log(np.bincount(node, np.exp(mass), tree.n_nodes))[node]
        for block in (BinaryBlock, WideBlock, RootBlock):
            edge = of_tree.edge[block.kind]
            # The mass of a binary node cancels.
            values = mass if block is BinaryBlock else share
            biases[block.kind][t, : len(edge)] = block.of_edges(values, edge)
    return biases
