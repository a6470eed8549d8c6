"""Reference of :func:`hstree.ops.path_log_prob`: one row and one tree at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def path_log_prob_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    path_offset: Tensor,
    path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None,
    max_depth: int,
) -> tuple[Tensor, Tensor]:
    """log_prob [N, T] and score [N, T, max_depth] in the dtype of hidden; differentiable."""
    log_probs, scores = [], []
    for i, y in enumerate(target.tolist()):
        for t in range(len(weight)):
            entry = path[:0] if y < 0 else path[path_offset[t, y] : path_offset[t, y + 1]]
            node = (entry >> 1).long()
            x = hidden[i] if feature_index is None else hidden[i, feature_index[t].long()]
            z = weight[t, node] @ x
            if bias is not None:
                z = z + bias[t, node]
            log_probs.append(F.logsigmoid(torch.where(entry & 1 == 1, z, -z)).sum())
            scores.append(F.pad(z, (0, max_depth - len(z))))
    shape = (len(hidden), len(weight))
    if not log_probs:
        return hidden.new_zeros(shape), hidden.new_zeros((*shape, max_depth))
    return torch.stack(log_probs).view(shape), torch.stack(scores).view(*shape, max_depth)
