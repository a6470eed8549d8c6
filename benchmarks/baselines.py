"""Baselines for hstree: torch's flat losses, the fastest trees built from torch's own ops, a
piecewise linear function by gather, and a direct implementation of a mixture of softmaxes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def flat_loss(input: Tensor, weight: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of a linear layer: input [N, D], weight [V, D], bias [V]."""
    return F.cross_entropy(F.linear(input, weight, bias), target)


def sampled_loss(
    input: Tensor, weight: Tensor, bias: Tensor, target: Tensor, negatives: int = 128
) -> Tensor:
    """A sampled softmax as one writes it: K log-uniform negatives for all rows, minus log K q, with
    dense gradients. The classes are numbered by decreasing frequency."""
    width = math.log(len(weight) + 1)
    classes = (torch.rand(negatives) * width).exp_().long().sub_(1).clamp_(0, len(weight) - 1)
    log_count = (torch.log1p(1 / (classes + 1.0)) / width * negatives).log()
    x = F.linear(input, weight[classes], bias[classes] - log_count)
    x = x.masked_fill(classes == target[:, None], -torch.inf)  # accidental hits
    of_target = (input * weight[target]).sum(1) + bias[target]
    return (torch.cat([of_target[:, None], x], 1).logsumexp(1) - of_target).mean()


def gathered_dot(input: Tensor, weight: Tensor, row: Tensor, node: Tensor) -> Tensor:
    """Dot products <input[row], weight[node]> for lists of rows, in order, and nodes. Copies both;
    the gradient of ``weight`` is sparse."""
    return (input.index_select(0, row) * F.embedding(node, weight, sparse=True)).sum(1)


class _BagDot(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, row: Tensor, node: Tensor) -> Tensor:
        begin = torch.searchsorted(row, torch.arange(len(input), device=row.device))
        ctx.save_for_backward(input, weight, row, node, begin)
        dot = torch.ops.aten._embedding_bag_per_sample_weights_backward
        z: Tensor = dot(input, weight, node, begin, row, 0)
        return z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, weight, row, node, begin = ctx.saved_tensors
        grad_input = F.embedding_bag(node, weight, begin, mode="sum", per_sample_weights=grad)
        node, order = node.sort()
        node, count = torch.unique_consecutive(node, return_counts=True)
        rows = F.embedding_bag(
            row[order],
            input,
            count.cumsum(0) - count,
            mode="sum",
            per_sample_weights=grad[order],
        )
        grad_weight = torch.sparse_coo_tensor(
            node[None], rows, weight.shape, is_coalesced=True, check_invariants=False
        )
        return grad_input, grad_weight, None, None


def bag_dot(input: Tensor, weight: Tensor, row: Tensor, node: Tensor) -> Tensor:
    """The same without copies, by torch's weighted embedding bags: the scores are the gradient of a
    bag with respect to its weights, and both gradients are bags, of the nodes of a row and of the
    rows of a node."""
    z: Tensor = _BagDot.apply(input, weight, row, node)  # type: ignore[no-untyped-call]
    return z


def torch_tree_log_softmax(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    target: Tensor,
    path_offset: Tensor,
    path: Tensor,
    feature_index: Tensor | None = None,
    *,
    dot: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = gathered_dot,
) -> Tensor:
    """hstree.ops.path_log_prob [N, T], vectorized: the paths of the batch in all trees are packed
    in one list, with sparse gradients.

    input [N, D], weight [T M, S], bias [T M, 1], target [N], path_offset [T, V + 1], path [P],
    feature_index [T, S] or None. Makes no gradient of size T x M x S.
    """
    trees, rows = len(path_offset), len(target)
    begin = path_offset[:, target].flatten()
    length = path_offset[:, target + 1].flatten() - begin
    row = torch.repeat_interleave(length)  # t N + i for row i and tree t
    first = length.cumsum(0) - length
    entry = path[(begin - first)[row] + torch.arange(len(row), device=row.device)]
    node = (entry >> 1).long() + row // rows * (len(weight) // trees)
    if feature_index is None:
        x = input.expand(trees, -1, -1).reshape(trees * rows, -1)
    else:
        x = input.index_select(1, feature_index.flatten())
        x = x.view(rows, trees, -1).transpose(0, 1).reshape(trees * rows, -1)
    z = dot(x, weight, row, node) + F.embedding(node, bias, sparse=True).squeeze(1)
    log_sigmoid = F.logsigmoid(torch.where(entry & 1 == 1, z, -z))
    return z.new_zeros(trees * rows).index_add(0, row, log_sigmoid).view(trees, rows).t()


def torch_plif(input: Tensor, slopes: Tensor, radius: float) -> Tensor:
    """hstree.ops.plif: input of any shape, slopes [K]. The times of gather, index_select, take and
    indexing differ by at most a sixth here; gather is the fastest."""
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
    """Mean loss of a mixture of softmaxes that computes all log-probabilities: latent [N, K, D],
    log_prior [N, K], weight [V, D], bias [V]."""
    log_prob = F.linear(latent, weight, bias).log_softmax(-1)
    return F.nll_loss((log_prob + log_prior[:, :, None]).logsumexp(1), target)
