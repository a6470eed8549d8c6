"""The vectors of the nodes: each node has its own, or classes of leaf groups read an embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hstree._products import is_cast
from hstree.heads.trees.blocks import BinaryBlock, Block, LeafBlock, RootBlock, WideBlock
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import LEAF, ROOT
from hstree.heads.tying import HasWeight, weight_to_tie
from hstree.ops._row_sparse import with_rows

NODE_VECTORS = ("free", "leaves")
"""Where the vectors of nodes come from. ``"free"``: every node has its own. ``"leaves"``: the
classes of all leaf groups read the rows of one output embedding, and the nodes above have vectors
of their own. A child of a wide root that is a class adds its own vector to its row of the output
embedding; a root over all classes has no vectors of its own."""

NODE_BLOCKS: tuple[type[Block], ...] = (BinaryBlock, WideBlock, RootBlock)
"""Blocks of nodes that may have vectors of their own."""


def register_vectors(head: EnsembleState, embedding: HasWeight | None) -> None:
    """Register the vectors on the head itself: their names in saved heads have no prefix.

    Raises:
        ValueError: for an embedding that the head does not read, or one of another shape.
    """
    leaves = head.node_vectors == "leaves"
    if leaves:
        shape = (head.n_classes, head.in_features)
        if embedding is None:
            head.output_embedding = nn.Parameter(torch.empty(shape))
        else:
            head.output_embedding = weight_to_tie(embedding, *shape)
    elif embedding is not None:
        raise ValueError(
            "embedding: expected None with node_vectors='free', got an embedding; pass "
            "node_vectors='leaves' to use it"
        )
    for block in NODE_BLOCKS:
        # A root over all classes reads the output embedding alone.
        rows = 0 if leaves and not head.layout.n_rows[LEAF] else head.layout.n_rows[block.kind]
        weight = nn.Parameter(torch.empty(head.n_trees, rows, head.subset_size)) if rows else None
        head.register_parameter(block.weight_name, weight)


def reset_vectors(head: EnsembleState) -> None:
    """Set all vectors to zero, except a tied embedding."""
    if head.node_vectors == "leaves" and not head.tied:
        nn.init.zeros_(head.output_embedding)
    for block in NODE_BLOCKS:
        own: Tensor | None = getattr(head, block.weight_name)
        if own is not None:
            nn.init.zeros_(own)


def blocks_with_vectors(head: EnsembleState) -> list[Block]:
    """The blocks of the head, ordered by kind."""
    embedding, root = None, head.root_weight
    if head.node_vectors == "leaves":
        embedding, root = _embedding_and_root(head, root)
    computed = {LEAF: embedding, ROOT: root}
    out = []
    for block in head.block_types:
        weight: Any = computed.get(block.kind)
        if weight is None:
            weight = getattr(head, block.weight_name)
        bias: Tensor = getattr(head, f"{block.prefix}bias")
        index = None if block is LeafBlock else head.feature_index
        out.append(block(weight, bias, head.layout, index, head.sparse))
    return out


def _embedding_and_root(head: EnsembleState, own: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output embedding [V, D], and vectors [T, C, S] of the children of wide roots, which have
    those in ``own`` or None."""
    layout, index = head.layout, head.feature_index
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
