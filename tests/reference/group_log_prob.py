"""Reference of :func:`hstree.ops.group_log_prob`: one row and one tree at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def group_log_prob_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, cluster: Tensor
) -> Tensor:
    """log_prob [N, T] in the dtype of hidden; differentiable."""
    log_probs = []
    for x, y in zip(hidden, target.tolist(), strict=True):
        for t, clusters in enumerate(cluster):
            if y < 0:
                log_probs.append(hidden.new_zeros(()))
                continue
            classes = (clusters == clusters[y]).nonzero().squeeze(1)
            z = F.linear(x, weight[classes], None if bias is None else bias[t, classes])
            log_probs.append(z.log_softmax(0)[classes == y].squeeze(0))
    shape = (len(hidden), len(cluster))
    return torch.stack(log_probs).view(shape) if log_probs else hidden.new_zeros(shape)
