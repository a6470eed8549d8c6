"""Reference of :func:`hstree.ops.wide_log_prob`: one row and one tree at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def wide_log_prob_reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    wide_offset: Tensor,
    wide_path: Tensor,
    leaf_position: Tensor,
    feature_index: Tensor | None,
    max_width: int,
) -> tuple[Tensor, Tensor]:
    """log_prob [N, T] and score [N, T, max_width] in the dtype of hidden; differentiable."""
    log_probs, scores = [], []
    for i, y in enumerate(target.tolist()):
        for t in range(len(weight)):
            nodes = [] if y < 0 else wide_path[wide_offset[t, y] : wide_offset[t, y + 1]].tolist()
            x = hidden[i] if feature_index is None else hidden[i, feature_index[t].long()]
            total, row_scores = hidden.new_zeros(()), [hidden.new_zeros(0)]
            for first_row, width, child in nodes:
                rows = slice(first_row, first_row + width)
                z = weight[t, rows] @ x
                if bias is not None:
                    z = z + bias[t, rows]
                row_scores.append(z.log_softmax(0))
                total = total + row_scores[-1][child]
            score = torch.cat(row_scores)
            log_probs.append(total)
            scores.append(F.pad(score, (0, max_width - len(score))))
    shape = (len(hidden), len(weight))
    if not log_probs:
        return hidden.new_zeros(shape), hidden.new_zeros((*shape, max_width))
    return torch.stack(log_probs).view(shape), torch.stack(scores).view(*shape, max_width)
