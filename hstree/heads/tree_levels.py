"""What each node on a path contributes to the log-probability of its class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hstree.heads.tree_ensemble import TreeEnsemble
from hstree.trees.paths import edge_paths


class LevelLogProbs(NamedTuple):
    """log P(target) of every tree, level by level: level 0 is the root, L the height of the
    highest tree.

    Attributes:
        log_prob: [N, T, L], log-probability of the child that holds the target, at the node of its
            path on each level; 0 below the leaf.
        group: bool [N, T, L], where that node is wide and not the root: a leaf group, usually.
        log_gate: [N, T], log pi.
    """

    log_prob: Tensor
    group: Tensor
    log_gate: Tensor


@torch.no_grad()
def level_log_probs(head: TreeEnsemble, hidden: Tensor, target: Tensor) -> LevelLogProbs:
    """The terms of ``head(hidden, target).output`` = logsumexp_t(log_gate + sum_l log_prob).

    Plain PyTorch, one level of one tree at a time, without gradient: for looking, not for training.

    Args:
        head: any ensemble of trees.
        hidden: [N, D].
        target: int64 [N] in [0, V).
    """
    dtype = head._sum_dtype(hidden)
    weights, biases = head._weights(), (head.bias, head.wide_bias, head.root_bias)
    classes = target.cpu().numpy()
    shape = (len(hidden), head.n_trees, max(tree.height for tree in head.trees))
    log_prob = torch.zeros(shape, dtype=dtype, device=hidden.device)
    group = np.zeros(shape, bool)
    for t, (tree, layout) in enumerate(zip(head.trees, head._layouts, strict=True)):
        x = hidden if head.feature_index is None else hidden[:, head.feature_index[t].long()]
        edges, width = tree.edges(), tree.n_children
        for level, edge in enumerate(edge_paths(tree, classes).T):
            for block, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                rows = np.flatnonzero((edge >= 0) & (layout.block[edge] == block))
                if not rows.size or weight is None or bias is None:
                    continue
                here, n = edge[rows], torch.from_numpy(rows).to(hidden.device)
                child = torch.from_numpy(edges.ordinal[here].astype(np.int64)).to(hidden.device)
                if block == 0:
                    row = torch.from_numpy(layout.row[here]).to(hidden.device)
                    z = (x[n].to(weight.dtype) * weight[t, row]).sum(1) + bias[t, row]
                    log_prob[n, t, level] = F.logsigmoid(torch.where(child == 0, z, -z).to(dtype))
                    continue
                group[rows, t, level] = block == 1
                for node in np.unique(edges.node[here]):  # one dense product for each wide node
                    first = int(layout.row[tree.node_offset[node] - node])
                    block_rows = slice(first, first + int(width[node]))
                    of = torch.from_numpy(edges.node[here] == node).to(hidden.device)
                    at = x[n[of]].to(weight.dtype)
                    z = F.linear(at, weight[t, block_rows], bias[t, block_rows]).to(dtype)
                    chosen = z.log_softmax(1).gather(1, child[of, None])[:, 0]
                    log_prob[n[of], t, level] = chosen
    return LevelLogProbs(
        log_prob, torch.from_numpy(group).to(hidden.device), head._log_gate(hidden)
    )
