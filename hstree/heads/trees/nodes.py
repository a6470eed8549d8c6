"""The nodes of the trees: their vectors and biases, and what they compute from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._numerics import batched_product, batched_scores, is_cast, linear_scores
from hstree.heads.rows import tempered
from hstree.heads.state import HasWeight, TyingError, fill, weight_to_tie
from hstree.heads.trees.layout import BINARY, KINDS, LEAF, ROOT, WIDE, Layout
from hstree.ops._row_sparse import with_rows
from hstree.ops.feature_gather import feature_gather
from hstree.ops.target_log_softmax import log_softmax, target_log_softmax
from hstree.ops.tree_op import leaf_log_prob, path_log_prob, wide_log_prob

FloatArray = npt.NDArray[np.float64]
Values = TypeVar("Values", FloatArray, Tensor)


FEW_CONTEXTS = 16
"""Up to so many contexts E h^T takes about half of the time of h E^T in torch."""

FEW_ROWS = 64
"""Up to so many contexts, adding E h to the scores of a wide root takes no more time than adding
rows of E to its vectors; a step with 512 takes a twelfth more for the root."""


@dataclass
class Block:
    """The nodes of one kind in T trees, with their parameters at one step.

    Attributes:
        weight: vectors of the nodes [T, R, S], R in the largest tree; see
            :class:`hstree.heads.trees.layout.TreeLayout`.
        bias: biases of the nodes [T, R].
        layout: tables of the trees.
        sparse: whether the gradients of the target's log-probability are row-sparse.
    """

    weight: Tensor
    bias: Tensor
    layout: Layout
    sparse: bool

    kind: ClassVar[int]
    weight_name: ClassVar[str]
    """Name of the parameter of :class:`Nodes` that its vectors are read from."""
    bias_name: ClassVar[str]
    visits_rows: ClassVar[bool]
    """Whether a step reads only the vectors on the paths of the targets, with the contexts sorted
    by leaf."""

    @staticmethod
    def of_edges(values: Values, edge: npt.NDArray[np.int32]) -> Values:
        """Values of the vectors, from values [E, ...] of the edges of a tree."""
        return values[edge]

    def features(self, hidden: Tensor, t: int) -> Tensor:
        """The features [..., S] of hidden [..., D] that its nodes read in tree t."""
        index = self.layout.feature_index
        return hidden if index is None else hidden[..., index[t].long()]

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

    kind, visits_rows = BINARY, True
    weight_name, bias_name = "binary_weight", "binary_bias"

    @staticmethod
    def of_edges(values: Values, edge: npt.NDArray[np.int32]) -> Values:
        """Value of the left child minus value of the right child."""
        return values[edge] - values[edge + 1]

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        layout = self.layout
        tables = layout.path_offset, layout.path, layout.leaf_position, layout.feature_index
        given: Any = {"sparse": self.sparse, "order": order}
        return path_log_prob(
            hidden, self.weight, self.bias, target, *tables, max_depth=layout.max_depth, **given
        )


class WideBlock(Block):
    """log-softmax of w . x + b over the children of a node."""

    kind, visits_rows = WIDE, True
    weight_name, bias_name = "wide_weight", "wide_bias"

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        layout = self.layout
        tables = layout.wide_offset, layout.wide_path, layout.leaf_position, layout.feature_index
        given: Any = {"sparse": self.sparse, "order": order}
        return wide_log_prob(
            hidden, self.weight, self.bias, target, *tables, max_width=layout.max_width, **given
        )


class LeafBlock(Block):
    """log-softmax of E_y . h + b_ty over the classes y of a leaf group, with the output embedding E
    of all trees: weight [V, D], bias [T, V] and all features."""

    kind, visits_rows = LEAF, True
    weight_name, bias_name = "output_embedding", "leaf_bias"

    def features(self, hidden: Tensor, t: int) -> Tensor:
        return hidden

    def rows(self, t: int, row: Tensor) -> tuple[Tensor, Tensor]:
        classes = self.layout.leaf_class[t, row].long()
        return self.weight[classes], self.bias[t, classes]

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        layout = self.layout
        tables = layout.group_offset, layout.group, layout.leaf_position, layout.leaf_class
        given: Any = {"sparse": self.sparse, "order": order}
        return leaf_log_prob(
            hidden, self.weight, self.bias, target, *tables, max_width=layout.max_group, **given
        )

    def class_scores(self, hidden: Tensor) -> Tensor:
        """E_y . h of all classes, [N, V], which all trees share, in the dtype of sums; on CUDA with
        contexts adjacent in memory, as the kernel reads them."""
        few = not torch.compiler.is_compiling() and len(hidden) <= FEW_CONTEXTS
        transposed = hidden.device.type == "cuda" or (few and not is_cast(self.weight))
        if transposed:
            return linear_scores(self.weight, hidden).t()
        return linear_scores(hidden, self.weight)


@dataclass
class RootBlock(Block):
    """A :class:`WideBlock` of wide roots, which all targets visit: one dense product.

    Attributes:
        class_rows: rows of the output embedding [U, D] of the classes that are children, which add
            them to their own vectors; None: no child does.
    """

    class_rows: Tensor | None = None

    kind, visits_rows = ROOT, False
    weight_name, bias_name = "root_weight", "root_bias"

    def target_log_prob(self, hidden: Tensor, target: Tensor, order: Tensor | None) -> Tensor:
        # The marks are indices too: an ignored row, -1, gets child -1, and V a child that does not
        # exist.
        if self.layout.feature_index is not None:
            child = self.layout.root_child[:, target].long()
            logits = self.logits(hidden).flatten(0, 1)
            return target_log_softmax(logits, child.flatten()).view_as(child).t()
        # Row n T + t: the scores of all roots are one product, whose rows are the contexts.
        child = self.layout.root_child.t()[target].long()
        logits = self._scores(hidden).view(-1, self.weight.shape[1])
        return target_log_softmax(logits, child.flatten()).view_as(child)

    def candidate_log_prob(self, hidden: Tensor, candidates: Tensor, temperature: float) -> Tensor:
        """log P(child that holds each candidate), [N, K, T]: hidden [N, D], candidates [N, K] from
        :func:`hstree.ops.mark_targets`, whose marks have any child."""
        child = self.layout.root_child[:, candidates].long()
        log_prob = self.log_prob(hidden, temperature)
        return log_prob.gather(2, child.clamp(0, log_prob.shape[2] - 1)).permute(1, 2, 0)

    def log_prob(self, hidden: Tensor, temperature: float) -> Tensor:
        """Log-probabilities of all children, [T, N, R], with the logits divided by the
        temperature: hidden [N, D]."""
        logits = self.logits(hidden)
        return log_softmax(logits) if temperature == 1.0 else tempered(logits, temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """w . x + b of all vectors, [T, N, R], in the dtype of sums: hidden [N, D]."""
        n_trees, n_children, _ = self.weight.shape
        index = self.layout.feature_index
        if index is None:
            return self._scores(hidden).view(-1, n_trees, n_children).transpose(0, 1)
        x, weight = tree_features(hidden.to(self.weight.dtype), index, n_trees), self.vectors()
        weight = weight.float() if is_cast(weight) else weight
        x, bias = x.to(weight.dtype), self.bias.to(weight.dtype)
        return batched_product(x, weight, bias.unsqueeze(1))

    def scores(self, x: Tensor) -> Tensor:
        layout, classes = self.layout, self.class_rows
        if classes is None or layout.feature_index is not None:
            return batched_scores(x, self.vectors(), self.bias)
        # All trees read the same features, x[0]: each class is scored once, for all roots it is
        # below.
        scores = super().scores(x)
        of_classes = linear_scores(classes, x[0].to(classes.dtype))[layout.root_source]
        return scores.flatten(0, 1).index_add(0, layout.root_row, of_classes).view_as(scores)

    def rows(self, t: int, row: Tensor) -> tuple[Tensor, Tensor]:
        return self.vectors()[t, row], self.bias[t, row]

    def _scores(self, hidden: Tensor) -> Tensor:
        """The same of trees that read all features, [N, T R]."""
        # One graph for all numbers of rows, and one kernel on a GPU.
        any_number = torch.compiler.is_compiling() or hidden.device.type != "cpu"
        if self.class_rows is None or any_number or len(hidden) > FEW_ROWS:
            rows, bias = self.vectors().flatten(0, 1), self.bias.flatten()
            return linear_scores(hidden.to(rows.dtype), rows, bias.to(rows.dtype))
        hidden = hidden.to(self.weight.dtype)
        scores = linear_scores(hidden, self.weight.flatten(0, 1), self.bias.flatten())
        of_classes = linear_scores(hidden, self.class_rows).index_select(1, self.layout.root_source)
        return scores.index_add(1, self.layout.root_row, of_classes)

    def vectors(self) -> Tensor:
        """The vectors [T, R, S] of the children, with the rows of E added."""
        if self.class_rows is None:
            return self.weight
        own, rows = self.weight, rows_of_children(self.layout, self.class_rows)
        if is_cast(own):  # the sum of two vectors is not rounded to 16 bits
            own, rows = own.float(), rows.float()
        return own.flatten(0, 1).index_add(0, self.layout.root_row, rows).view_as(own)


def rows_of_children(layout: Layout, class_rows: Tensor) -> Tensor:
    """Rows [K, S] for the children of wide roots that are classes: rows [U, D] of the classes."""
    rows = class_rows.index_select(0, layout.root_source)
    if layout.feature_index is None:
        return rows
    tree = layout.root_row // layout.n_rows[ROOT]
    return rows.gather(1, layout.feature_index[tree].long())


BLOCKS: tuple[type[Block], ...] = (BinaryBlock, WideBlock, LeafBlock, RootBlock)
"""The block types, indexed by kind."""

NODE_BLOCKS = (BinaryBlock, WideBlock, RootBlock)
"""Blocks of nodes that may have vectors of their own."""


def to_dtype_of(blocks: Sequence[Block], hidden: Tensor) -> Tensor:
    """``hidden`` in the dtype of the blocks' vectors."""
    return hidden.to(blocks[0].weight.dtype) if blocks else hidden


def tree_features(hidden: Tensor, feature_index: Tensor | None, n_trees: int) -> Tensor:
    """Features [T, N, S] that each tree reads of hidden [N, D]."""
    if feature_index is None:
        return hidden.expand(n_trees, -1, -1)
    return feature_gather(hidden, feature_index).transpose(0, 1)


class Nodes(nn.Module):
    """The parameters of the nodes of T trees. Calling it gives the blocks of this step.

    Without leaf groups in the layout every node has its own vectors. With them the classes of all
    leaf groups read the rows of one output embedding E [V, D], and only the nodes above have
    vectors of their own. A child of a wide root that is a class adds its own vector to its row of
    E; a root over all classes has no vectors of its own.

    Args:
        layout: tables of the trees.
        in_features: number of input features, D.
        embedding: module whose weight is used as E; None: its own, if there are leaf groups.
        sparse: see :class:`Block`.

    Attributes:
        binary_weight, wide_weight, root_weight: vectors [T, R, S] for each kind of node that the
            layout has, else None; so are the other parameters.
        binary_bias, wide_bias, root_bias: biases [T, R].
        leaf_bias: biases of the classes in leaf groups [T, V].
        output_embedding: E [V, D].
        tied: whether E belongs to another module.

    Raises:
        ValueError: for an embedding that the nodes do not read, or one of another shape.
    """

    binary_weight: Tensor | None
    wide_weight: Tensor | None
    root_weight: Tensor | None
    binary_bias: Tensor | None
    wide_bias: Tensor | None
    root_bias: Tensor | None
    leaf_bias: Tensor | None
    output_embedding: Tensor | None

    def __init__(
        self,
        layout: Layout,
        in_features: int,
        *,
        embedding: HasWeight | None = None,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if embedding is not None and not layout.leaf_groups:
            raise TyingError(
                "embedding: expected None with node_vectors='free', got an embedding; pass "
                "node_vectors='leaves' to use it"
            )
        self.in_features, self.sparse = in_features, sparse
        self.tied = embedding is not None
        for name, shape in self._shapes(layout).items():
            parameter = None if shape is None else nn.Parameter(torch.empty(shape))
            self.register_parameter(name, parameter)
        self.register_parameter("output_embedding", None)
        if layout.leaf_groups:
            shape = (layout.n_classes, in_features)
            if embedding is None:
                self.output_embedding = nn.Parameter(torch.empty(shape))
            else:
                self.output_embedding = weight_to_tie(embedding, *shape)

    def _shapes(self, layout: Layout) -> dict[str, tuple[int, ...] | None]:
        """Shapes of the parameters of the nodes by name; None for one that there is not."""
        index = layout.feature_index
        shapes: dict[str, tuple[int, ...] | None] = {}
        subset_size = self.in_features if index is None else index.shape[1]
        # A root over all classes reads the output embedding alone.
        own_vectors = not layout.leaf_groups or bool(layout.n_rows[LEAF])
        for block in BLOCKS:
            rows = layout.n_rows[block.kind]
            shape = (layout.n_trees, rows)
            shapes[block.bias_name] = shape if rows else None
            if block is not LeafBlock:
                has_vectors = rows and own_vectors
                shapes[block.weight_name] = (*shape, subset_size) if has_vectors else None
        return shapes

    def forward(self, layout: Layout) -> list[Block]:
        """One block for each kind of node in the trees, ordered by kind."""
        embedding: Any = None
        class_rows = None
        if layout.leaf_groups:
            embedding = self.class_vectors()
            if len(layout.root_row):
                # A root over all classes reads all rows of the embedding.
                sparse = self.sparse and self.root_weight is not None
                # One gradient tensor for both uses of E: to add a second one would be a pass over
                # [V, D].
                embedding, class_rows = with_rows(embedding, layout.root_class, sparse=sparse)
        blocks: list[Block] = []
        for block in BLOCKS:
            if not layout.n_rows[block.kind]:
                continue
            weight = embedding if block is LeafBlock else getattr(self, block.weight_name)
            rest = getattr(self, block.bias_name), layout, self.sparse
            if block is not RootBlock:
                blocks.append(block(weight, *rest))
            elif weight is None:
                assert class_rows is not None
                rows = rows_of_children(layout, class_rows)
                blocks.append(RootBlock(rows.view(layout.n_trees, -1, rows.shape[1]), *rest))
            else:
                blocks.append(RootBlock(weight, *rest, class_rows))
        return blocks

    def class_vectors(self) -> Tensor:
        """The output embedding E [V, D], as the blocks read it, once in each call."""
        assert self.output_embedding is not None
        return self.output_embedding

    def sparse_parameters(self) -> list[nn.Parameter]:
        """Parameters with row-sparse gradients. A tied embedding belongs to the model, whose own
        part of the gradient may be dense."""
        names = [
            name
            for block in BLOCKS
            if self.sparse and block.visits_rows
            for name in (block.weight_name, block.bias_name)
            if not (self.tied and name == "output_embedding")
        ]
        return [value for value in (getattr(self, name) for name in names) if value is not None]

    def reset(self, layout: Layout, frequencies: FloatArray) -> None:
        """Set all vectors to zero, except a tied embedding, and the biases so that the nodes then
        give the distribution of the frequencies [V]. Not called ``reset_parameters``, because it
        needs arguments."""
        for block, values in zip(BLOCKS, _log_odds(layout, frequencies), strict=True):
            weight, bias = getattr(self, block.weight_name), getattr(self, block.bias_name)
            if weight is not None and not (self.tied and block is LeafBlock):
                nn.init.zeros_(weight)
            if bias is not None:
                fill(bias, values)

    @property
    def on_meta(self) -> bool:
        """Whether the biases are on the meta device."""
        biases = [getattr(self, block.bias_name) for block in BLOCKS]
        return any(bias is not None and bias.is_meta for bias in biases)


def _log_odds(layout: Layout, frequencies: FloatArray) -> list[FloatArray]:
    """Biases [T, R] of each kind of node: with zero vectors they give the distribution of the
    frequencies [V].

    log(mass of the left subtree / mass of the right subtree) for a binary node, log(mass of the
    child / mass of the node) for a child of a wide node, and log(mass of the class / mass of all)
    in leaf groups, [1, V] by class. There only differences within a group matter, and this is the
    same in all trees.
    """
    n_trees, n_rows = layout.n_trees, layout.n_rows
    biases = [np.zeros((1 if kind == LEAF else n_trees, n_rows[kind])) for kind in KINDS]
    if n_rows[LEAF]:
        biases[LEAF][:] = np.log(frequencies) - np.log(frequencies.sum())
    for t, of_tree in enumerate(layout.trees):
        tree = of_tree.tree
        mass = tree.edge_masses(frequencies)
        # The edges of node m begin at node_offset[m] - m.
        of_node = np.add.reduceat(mass, tree.node_offset[:-1] - np.arange(tree.n_nodes))
        np.log(mass, out=mass)
        share = mass - np.repeat(np.log(of_node), tree.n_children)
        for block in NODE_BLOCKS:
            edge = of_tree.edge[block.kind]
            # The mass of a binary node cancels.
            values = mass if block is BinaryBlock else share
            biases[block.kind][t, : len(edge)] = block.of_edges(values, edge)
    return biases
