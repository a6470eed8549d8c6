"""Reference of :mod:`hstree.ops.tree_log_prob`: one node at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_log_prob_reference(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    wide_begin: int,
    root_begin: int,
) -> Tensor:
    """log P [N, V], differentiable any number of times; arguments of
    :func:`hstree.ops.tree_log_prob`."""
    trees = []
    for t in range(len(score)):
        path = {-1: log_gate[:, t]}  # by edge
        leaf = {} if n_classes > 1 else {0: log_gate[:, t]}
        for block, row, first_edge, width, above in node[t].tolist():
            if not width:
                continue  # padding of the table
            first = row + (0, wide_begin, root_begin)[block]
            z = score[t, first : first + (1 if block == 0 else width)]
            children = F.logsigmoid(torch.cat([z, -z])) if block == 0 else z.log_softmax(0)
            for e, log_prob in enumerate(children, first_edge):
                path[e] = path[above] + log_prob
                below = int(edge[t, e, 1])
                if below < 0:
                    leaf[~below] = path[e]
        trees.append(torch.stack([leaf[y] for y in range(n_classes)], 1))
    return torch.logsumexp(torch.stack(trees), 0)
