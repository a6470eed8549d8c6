"""The most probable classes: by best-first search on the CPU, from all classes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hstree._dtypes import sum_dtype
from hstree.heads.losses import split_rows
from hstree.heads.trees.blocks import Block, RootBlock, to_dtype_of
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import KINDS
from hstree.ops import tree_topk


def search_classes(
    head: EnsembleState, blocks: Sequence[Block], hidden: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and classes [N, k] from :func:`hstree.ops.tree_topk`, without gradient:
    hidden [N, D]."""
    x, layout = to_dtype_of(blocks, hidden).detach(), head.layout
    dtype = sum_dtype(x.dtype)
    of_kind = {block.kind: block for block in blocks}
    binary, wide, leaf, root = (of_kind.get(kind) for kind in KINDS)
    root_log_prob = None
    if isinstance(root, RootBlock):
        root_log_prob = root.logits(hidden).detach().to(dtype).log_softmax(-1)
    return tree_topk(
        x,
        binary.weight.detach() if binary else None,
        binary.bias.detach() if binary else None,
        wide.weight.detach() if wide else None,
        wide.bias.detach() if wide else None,
        leaf.weight.detach() if leaf else None,
        leaf.bias.detach() if leaf else None,
        root_log_prob,
        head.log_gate(hidden).detach().to(dtype),
        head.feature_index,
        layout.node,
        layout.edge,
        layout.leaf_edge,
        k,
    )


def rank_classes(head: EnsembleState, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same from the log-probabilities of all classes, in chunks of rows."""
    chunks = split_rows(head.numbers_of_a_row(), hidden)
    parts = [head.class_log_prob(rows).topk(k) for (rows,) in chunks]
    values, classes = zip(*parts, strict=True)
    return torch.cat(values), torch.cat(classes)
