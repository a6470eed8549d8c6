"""What hstree is measured against: torch's flat losses, and the best tree that torch's own ops
give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def flat_loss(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of a linear layer: input [N, D], weight [V, D], bias [V]."""
    return F.cross_entropy(F.linear(input, weight, bias), target)


def torch_tree_loss(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, path_offset: Tensor, path: Tensor
) -> Tensor:
    """Mean loss of one binary tree, vectorised: the batch's paths packed in one list, sparse
    gradients.

    input [N, D], weight [M, D], bias [M, 1], target [N], path_offset [V + 1], path [P]. Nodes are
    looked up with F.embedding(sparse=True), so that no gradient of size M x D is made.
    """
    begin, length = path_offset[target], path_offset[target + 1] - path_offset[target]
    row = torch.repeat_interleave(length)
    first = length.cumsum(0) - length
    entry = path[begin[row] + torch.arange(len(row)) - first[row]]
    node = (entry >> 1).long()
    z = (input[row] * F.embedding(node, weight, sparse=True)).sum(1)
    z = z + F.embedding(node, bias, sparse=True).squeeze(1)
    return -F.logsigmoid(torch.where(entry & 1 == 1, z, -z)).sum() / len(target)
