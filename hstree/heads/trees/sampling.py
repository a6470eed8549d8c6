"""Ancestral sampling: a tree by the gate, then a child at each node of a path."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree.heads.trees.blocks import BinaryBlock, Block, RootBlock
from hstree.heads.trees.state import EnsembleState

IntArray = npt.NDArray[np.int64]


def sample_classes(
    head: EnsembleState, hidden: Tensor, generator: torch.Generator | None
) -> Tensor:
    """One class for each context, int64 [N]: hidden [N, D]. Computes O(L) scores for a path of L
    nodes."""
    out = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    if not len(hidden):
        return out
    blocks, gate = head.blocks(), head.log_gate(hidden).softmax(1)
    chosen = torch.multinomial(gate, 1, generator=generator).squeeze(1)
    for t in range(head.n_trees):
        of = (chosen == t).nonzero().squeeze(1)
        if len(of):
            out[of] = _walk(head, t, blocks, hidden[of], generator)
    return out


def _walk(
    head: EnsembleState,
    t: int,
    blocks: Sequence[Block],
    hidden: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Classes [N] drawn from tree t: hidden [N, D]."""
    layout = head.layout.trees[t]
    tree, edges = layout.tree, layout.tree.edges()
    leaf = np.zeros(len(hidden), np.int64)
    node = np.full(len(hidden), 0 if tree.n_nodes else -1, np.int64)
    while (active := np.flatnonzero(node >= 0)).size:
        now = node[active]
        kind, first_row = layout.kind[now], layout.first_row[now]
        first_edge = tree.node_offset[now] - now
        n_children = tree.node_offset[now + 1] - tree.node_offset[now] - 1
        child = np.empty(len(active), np.int64)
        for block in blocks:
            of = np.flatnonzero(kind == block.kind)
            if of.size:
                here = hidden[torch.from_numpy(active[of]).to(hidden.device)]
                child[of] = _draw(block, t, first_row[of], n_children[of], here, generator)
        edge = first_edge + child
        node[active] = edges.child_node[edge]
        done = edges.child_node[edge] < 0
        leaf[active[done]] = edges.begin[edge[done]]
    return torch.from_numpy(tree.order[leaf].astype(np.int64)).to(hidden.device)


def _draw(
    block: Block,
    t: int,
    first_row: IntArray,
    n_children: IntArray,
    hidden: Tensor,
    generator: torch.Generator | None,
) -> IntArray:
    """A child of one node for each context: hidden [N, D]."""
    binary = isinstance(block, BinaryBlock)
    n_rows = np.ones_like(n_children) if binary else n_children
    place = np.arange(int(n_rows.max()))
    row = torch.from_numpy(first_row[:, None] + np.minimum(place, n_rows[:, None] - 1))
    row = row.to(hidden.device)
    vectors, bias = block.rows(t, row[0] if isinstance(block, RootBlock) else row)
    x = block.features(hidden, t).unsqueeze(-1).to(vectors.dtype)
    z = (vectors @ x).squeeze(-1) + bias
    if binary:
        prob = torch.cat([z, torch.zeros_like(z)], 1).softmax(1)
    else:
        beyond = torch.from_numpy(place >= n_rows[:, None]).to(hidden.device)
        prob = z.masked_fill(beyond, -torch.inf).softmax(1)
    drawn = torch.multinomial(prob.float(), 1, generator=generator).squeeze(1)
    child: IntArray = drawn.cpu().numpy()
    return child
