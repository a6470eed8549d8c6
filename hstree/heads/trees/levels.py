"""Log-probabilities of the target at each node of its path."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree._numerics import linear_scores, sum_dtype
from hstree.heads.trees.ensemble import TreeEnsemble
from hstree.heads.trees.nodes import BinaryBlock, LeafBlock, WideBlock
from hstree.trees.paths import edge_paths


class LevelLogProbs(NamedTuple):
    """log P(target) of every tree, split by level. Level 0 is the root; L is the height of the
    highest tree.

    Attributes:
        log_prob: log-probability of the child that holds the target, at the node of its path on
            each level, [N, T, L]; 0 below the leaf.
        group: whether that node is wide and not the root, usually a leaf group; bool [N, T, L].
            With ``node_vectors="leaves"`` also for leaf groups of two classes.
        log_gate: log-weights of the trees, log pi [N, T].
    """

    log_prob: Tensor
    group: Tensor
    log_gate: Tensor


@torch.no_grad()
def level_log_probs(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> LevelLogProbs:
    """The terms of ``head(hidden, target).output`` = logsumexp_t(log_gate + sum_l log_prob).

    Plain PyTorch, one level of one tree at a time, without gradient: for analysis, not training.

    Args:
        head: an ensemble of trees.
        hidden: context vectors [N, D].
        target: classes, int64 [N] in [0, V).
    """
    device, dtype = hidden.device, sum_dtype(hidden.dtype)
    blocks, classes = head.nodes(head.layout), target.cpu().numpy()
    shape = (len(hidden), head.n_trees, max(tree.height for tree in head.trees))
    log_prob = torch.zeros(shape, dtype=dtype, device=device)
    group = np.zeros(shape, bool)
    for t, layout in enumerate(head.layout.trees):
        edges, n_children = layout.tree.edges(), layout.tree.n_children
        for level, edge in enumerate(edge_paths(layout.tree, classes).T):
            node = edges.node[edge]
            for block in blocks:
                of = np.flatnonzero((edge >= 0) & (layout.kind[node] == block.kind))
                if not of.size:
                    continue
                x = block.features(hidden, t)
                n = torch.from_numpy(of).to(device)
                child = torch.from_numpy(edges.ordinal[edge[of]].astype(np.int64)).to(device)
                if isinstance(block, BinaryBlock):
                    row = torch.from_numpy(layout.first_row[node[of]]).to(device)
                    weight, bias = block.rows(t, row)
                    z = (x[n].to(dtype) * weight.to(dtype)).sum(1) + bias
                    log_prob[n, t, level] = F.logsigmoid(torch.where(child == 0, z, -z).to(dtype))
                    continue
                group[of, t, level] = isinstance(block, (WideBlock, LeafBlock))
                for m in np.unique(node[of]):  # one dense product for each wide node
                    first = int(layout.first_row[m])
                    row = torch.arange(first, first + int(n_children[m]), device=device)
                    weight, bias = block.rows(t, row)
                    here = torch.from_numpy(node[of] == m).to(device)
                    z = linear_scores(x[n[here]].to(weight.dtype), weight, bias)
                    chosen = z.log_softmax(1).gather(1, child[here, None])[:, 0]
                    log_prob[n[here], t, level] = chosen
    return LevelLogProbs(log_prob, torch.from_numpy(group).to(device), head.log_gate(hidden))
