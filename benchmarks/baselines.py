"""What hstree is measured against: torch's flat losses, the best tree that torch's own ops give, a
piecewise linear function by gather, and a mixture of softmaxes as its formula reads."""

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


def torch_plif(input: Tensor, slopes: Tensor, radius: float) -> Tensor:
    """hstree.ops.plif: input of any shape, slopes [K]. gather, index_select, take and indexing take
    the same time here, within a sixth; gather is the fastest."""
    rise = slopes * (2 * radius / len(slopes))
    knots = rise.cumsum(0) - rise
    t = (input + radius) * (len(slopes) / (2 * radius))
    j = t.detach().floor().clamp(0, len(slopes) - 1)
    index = j.long().flatten()
    value, slope = (part.gather(0, index).view_as(input) for part in (knots, rise))
    return value + slope * (t - j)


def torch_mixture_loss(
    latent: Tensor, log_prior: Tensor, weight: Tensor, bias: Tensor, target: Tensor
) -> Tensor:
    """Mean loss of a mixture of softmaxes with all its log-probabilities: latent [N, K, D],
    log_prior [N, K], weight [V, D], bias [V]."""
    log_prob = F.linear(latent, weight, bias).log_softmax(-1)
    return F.nll_loss((log_prob + log_prior[:, :, None]).logsumexp(1), target)


def dense_products(latent: Tensor, weight: Tensor, logits: Tensor, out: list[Tensor]) -> None:
    """The matrix products of a mixture of softmaxes and no more, three for each of K components:
    the logits, and the gradients of latent vectors and weight, here as if that of the logits were
    the logits.

    latent [K, N, D], weight [V, D], logits [N, V], out [N, D] and [V, D].
    """
    for part in latent:
        torch.mm(part, weight.t(), out=logits)
        torch.mm(logits, weight, out=out[0])
        torch.mm(logits.t(), part, out=out[1])
