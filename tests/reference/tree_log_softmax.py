"""Reference of :func:`hstree.ops.tree_log_softmax`: one node at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tree_log_softmax_reference(
    score: Tensor,
    log_gate: Tensor,
    node: Tensor,
    edge: Tensor,
    n_classes: int,
    root_begin: int,
    class_score: Tensor | None = None,
    class_bias: Tensor | None = None,
) -> Tensor:
    """log P [N, V], differentiable any number of times; arguments of
    :func:`hstree.ops.tree_log_softmax`."""
    trees = []
    for t in range(len(score)):
        path = {-1: log_gate[:, t]}  # by edge
        leaf = {} if n_classes > 1 else {0: log_gate[:, t]}
        for block, row, first_edge, width, above in node[t].tolist():
            if not width:
                continue  # padding of the table
            if block == 1:
                assert class_score is not None
                assert class_bias is not None
                classes = ~edge[t, first_edge : first_edge + width, 1].long()
                z = (class_score[:, classes] + class_bias[t, classes]).t()
            else:
                first = row + (root_begin if block == 2 else 0)
                z = score[t, first : first + (1 if block == 0 else width)]
            children = F.logsigmoid(torch.cat([z, -z])) if block == 0 else z.log_softmax(0)
            for e, log_prob in enumerate(children, first_edge):
                path[e] = path[above] + log_prob
                below = int(edge[t, e, 1])
                if below < 0:
                    leaf[~below] = path[e]
        trees.append(torch.stack([leaf[y] for y in range(n_classes)], 1))
    return torch.logsumexp(torch.stack(trees), 0)
