"""The vectors of the nodes: free, or read from an output embedding, at the leaves or everywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._products import is_cast
from hstree.heads.buffers import fill
from hstree.heads.trees.blocks import BinaryBlock, Block, LeafBlock, RootBlock, WideBlock
from hstree.heads.trees.layout import Layout
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import LEAF, ROOT
from hstree.heads.tying import HasWeight, weight_to_tie
from hstree.ops._rows import with_rows

DERIVED_SCALE = 3.0

NODE_BLOCKS: tuple[type[Block], ...] = (BinaryBlock, WideBlock, RootBlock)
"""Blocks of nodes that may have vectors or scales of their own."""


class NodeVectors(ABC):
    """Parameters of the node vectors, registered on the head itself: their names in saved heads
    have no prefix."""

    needs_bounds: ClassVar[bool] = False
    """Whether :meth:`blocks` reads the bounds of :class:`hstree.heads.trees.layout.Layout`."""

    leaf_groups: ClassVar[bool] = False
    """Whether leaf groups are a kind of nodes of their own."""

    @abstractmethod
    def register(self, head: EnsembleState, embedding: HasWeight | None) -> None:
        """Register the parameters on the head.

        Raises:
            ValueError: for options of the head that these vectors do not support.
        """

    @abstractmethod
    def reset(self, head: EnsembleState) -> None:
        """Set the parameters to their initial values."""

    @abstractmethod
    def blocks(self, head: EnsembleState) -> list[Block]:
        """The blocks of the head, ordered by kind."""


class FreeVectors(NodeVectors):
    """Every node has its own vectors, which start at zero."""

    def register(self, head: EnsembleState, embedding: HasWeight | None) -> None:
        if embedding is not None:
            raise ValueError(
                "embedding: expected None with node_vectors='free', got an embedding; pass "
                "node_vectors='leaves' or 'shared' to use it"
            )
        _register_own(head, NODE_BLOCKS)

    def reset(self, head: EnsembleState) -> None:
        for block in head.block_types:
            nn.init.zeros_(getattr(head, block.weight_name))

    def blocks(self, head: EnsembleState) -> list[Block]:
        layout, index = head.layout, head.feature_index
        out = []
        for block in head.block_types:
            weight: Tensor = getattr(head, block.weight_name)
            bias: Tensor = getattr(head, f"{block.prefix}bias")
            out.append(block(weight, bias, layout, index, head.sparse))
        return out


class LeafVectors(NodeVectors):
    """The classes of all leaf groups read the rows of one output embedding. The nodes above have
    vectors of their own. All start at zero, except a tied embedding. A child of a wide root that is
    a class adds its own vector to its row of the output embedding; a root over all classes has no
    vectors of its own."""

    leaf_groups = True

    def register(self, head: EnsembleState, embedding: HasWeight | None) -> None:
        _register_embedding(head, embedding)
        _register_own(head, NODE_BLOCKS if head.layout.n_rows[LEAF] else ())

    def reset(self, head: EnsembleState) -> None:
        if not head.tied:
            nn.init.zeros_(head.output_embedding)
        for block in NODE_BLOCKS:
            own: Tensor | None = getattr(head, block.weight_name)
            if own is not None:
                nn.init.zeros_(own)

    def blocks(self, head: EnsembleState) -> list[Block]:
        layout, index = head.layout, head.feature_index
        embedding, root = self._embedding_and_root(head)
        out = []
        for block in head.block_types:
            bias: Tensor = getattr(head, f"{block.prefix}bias")
            if block is RootBlock:
                weight = root
            elif block is LeafBlock:
                weight = embedding
            else:
                weight = getattr(head, block.weight_name)
            features = None if block is LeafBlock else index
            out.append(block(weight, bias, layout, features, head.sparse))
        return out

    @staticmethod
    def _embedding_and_root(head: EnsembleState) -> tuple[Tensor, Tensor]:
        """The output embedding [V, D], and vectors [T, C, S] of the children of wide roots."""
        layout, index, own = head.layout, head.feature_index, head.root_weight
        embedding = head.class_vectors()
        if own is not None and not len(layout.root_row):
            return embedding, own
        # A root over all classes reads all rows of the embedding.
        sparse = head.sparse and own is not None
        embedding, rows = with_rows(embedding, layout.root_class, sparse=sparse)
        if index is not None:
            tree = layout.root_row // layout.n_rows[ROOT]
            rows = rows.gather(1, index[tree].long())
        if own is None:
            return embedding, rows.view(head.n_trees, -1, head.subset_size)
        if is_cast(own):  # the sum of two vectors is not rounded to 16 bits
            own, rows = own.float(), rows.float()
        return embedding, own.flatten(0, 1).index_add(0, layout.root_row, rows).view_as(own)


class SharedVectors(NodeVectors):
    """Every vector is a scaled mean of the rows of an output embedding over the classes below a
    child; at a binary node, the left child's mean minus the right child's."""

    needs_bounds = True

    def register(self, head: EnsembleState, embedding: HasWeight | None) -> None:
        if head.sparse:
            raise ValueError(
                "sparse: expected False with node_vectors='shared', whose gradients are dense, got "
                "True"
            )
        _register_embedding(head, embedding)
        # In units of 2^-50, at least 1: integers, which .half() does not change.
        share = head.frequencies / head.frequencies.sum()
        units = np.maximum(np.rint(share * 2.0**50), 1).astype(np.int64)
        head.register_table("mass", torch.from_numpy(units))
        for block in NODE_BLOCKS:
            rows = head.layout.n_rows[block.kind]
            scale = nn.Parameter(torch.empty(head.n_trees, rows)) if rows else None
            head.register_parameter(f"{block.prefix}scale", scale)

    def reset(self, head: EnsembleState) -> None:
        if not head.tied:
            nn.init.uniform_(head.output_embedding, -0.1, 0.1)
        for block in head.block_types:
            fill(getattr(head, f"{block.prefix}scale"), first_scale(head.layout, block))

    def blocks(self, head: EnsembleState) -> list[Block]:
        layout, index = head.layout, head.feature_index
        embedding = head.class_vectors()
        of_trees = [self._tree_vectors(head, embedding, t) for t in range(head.n_trees)]
        out = []
        for block, vectors in zip(head.block_types, zip(*of_trees, strict=True), strict=True):
            scale: Tensor = getattr(head, f"{block.prefix}scale")
            bias: Tensor = getattr(head, f"{block.prefix}bias")
            weight = torch.stack(vectors) * scale.unsqueeze(-1)
            out.append(block(weight, bias, layout, index, head.sparse))
        return out

    @staticmethod
    def _tree_vectors(head: EnsembleState, embedding: Tensor, t: int) -> list[Tensor]:
        """Unscaled vectors [R, S] of the blocks in tree t, computed from differences of prefix sums
        in leaf order."""
        layout = head.layout
        if head.feature_index is not None:
            embedding = embedding[:, head.feature_index[t].long()]
        leaf_class = layout.leaf_class[t].long()
        mass = head.mass.double()[leaf_class]
        sums = F.pad((embedding[leaf_class].double() * mass.unsqueeze(1)).cumsum(0), (0, 0, 1, 0))
        masses = F.pad(mass.cumsum(0), (1, 0))
        out = []
        for block in head.block_types:
            ends = [(sums[at], masses[at]) for at in layout.bounds(block.kind)[t].unbind(1)]
            means = [
                ((end - begin) / (up_to - before).unsqueeze(1)).to(embedding.dtype)
                for (begin, before), (end, up_to) in pairwise(ends)
            ]
            out.append(means[0] - means[1] if block is BinaryBlock else means[0])
        return out


def first_scale(layout: Layout, block: type[Block]) -> npt.NDArray[np.float64]:
    """Initial scales of shared vectors: 1 where the means are over single classes, 3 elsewhere."""
    scale = np.ones((len(layout.trees), layout.n_rows[block.kind]))
    for t, of_tree in enumerate(layout.trees):
        edge, inner = of_tree.edge[block.kind], of_tree.tree.edges().child_node >= 0
        above_inner = inner[edge]
        if block is BinaryBlock:
            above_inner |= inner[edge + 1]
        scale[t, np.flatnonzero(above_inner)] = DERIVED_SCALE
    return scale


def _register_embedding(head: EnsembleState, embedding: HasWeight | None) -> None:
    """Register the output embedding [V, D]: the given one, or a parameter of the head."""
    shape = (head.n_classes, head.in_features)
    if embedding is None:
        head.output_embedding = nn.Parameter(torch.empty(shape))
    else:
        head.output_embedding = weight_to_tie(embedding, *shape)


def _register_own(head: EnsembleState, blocks: Sequence[type[Block]]) -> None:
    """Register the vectors of the blocks' nodes; None for other blocks."""
    for block in NODE_BLOCKS:
        rows = head.layout.n_rows[block.kind] if block in blocks else 0
        shape = (head.n_trees, rows, head.subset_size)
        weight = nn.Parameter(torch.empty(shape)) if rows else None
        head.register_parameter(block.weight_name, weight)


NODE_VECTORS: dict[str, NodeVectors] = {
    "free": FreeVectors(),
    "leaves": LeafVectors(),
    "shared": SharedVectors(),
}
