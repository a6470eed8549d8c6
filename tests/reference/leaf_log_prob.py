"""Reference of :func:`hstree.ops.leaf_log_prob`: one row and one tree at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def leaf_log_prob_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    group_offset: Tensor,
    group: Tensor,
    leaf_position: Tensor,
    leaf_class: Tensor,
    max_width: int,
) -> tuple[Tensor, Tensor]:
    """log_prob [N, T] and score [N, T, max_width] in the dtype of hidden; differentiable."""
    log_probs, scores = [], []
    for x, y in zip(hidden, target.tolist(), strict=True):
        for t, classes in enumerate(leaf_class.long()):
            log_prob, row_scores = hidden.new_zeros(()), [hidden.new_zeros(0)]
            nodes = [] if y < 0 else group[group_offset[t, y] : group_offset[t, y + 1]].tolist()
            for first_leaf, width, child in nodes:
                members = classes[first_leaf : first_leaf + width]
                z = F.linear(x, weight[members], None if bias is None else bias[t, members])
                row_scores.append(z.log_softmax(0))
                log_prob = log_prob + row_scores[-1][child]
            log_probs.append(log_prob)
            score = torch.cat(row_scores)
            scores.append(F.pad(score, (0, max_width - len(score))))
    shape = (len(hidden), len(leaf_class))
    if not log_probs:
        return hidden.new_zeros(shape), hidden.new_zeros((*shape, max_width))
    return torch.stack(log_probs).view(shape), torch.stack(scores).view(*shape, max_width)
