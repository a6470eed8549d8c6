"""The nodes above the leaf groups, fitted to contexts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hstree.heads.trees.blocks import LeafBlock, to_dtype_of
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.vectors import NODE_BLOCKS
from hstree.ops import mark_targets


def fit_nodes(
    head: EnsembleState,
    hidden: Tensor,
    target: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """See :meth:`hstree.heads.TreeEnsemble.fit_nodes`."""
    if head.node_vectors != "leaves":
        raise ValueError(
            "node_vectors: expected 'leaves', whose nodes above the leaf groups can be fitted "
            f"alone, got {head.node_vectors!r}"
        )
    if hidden.shape != (len(target), head.in_features) or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: expected floating point of shape [{len(target)}, {head.in_features}], got "
            f"{hidden.dtype} of shape {list(hidden.shape)}"
        )
    target = mark_targets(target, head.n_classes, head.ignore_index)
    parameters = own_parameters(head)
    if not parameters or not len(target):
        return
    optimizer = torch.optim.Adam(parameters, learning_rate)
    steps = -(-len(target) // batch_size)
    schedule = CosineAnnealingLR(optimizer, epochs * steps)
    generator = torch.Generator().manual_seed(seed % 2**63)
    for _ in range(epochs):
        order = torch.randperm(len(target), generator=generator).to(hidden.device)
        for rows in torch.split(order, batch_size):
            with torch.enable_grad():
                loss = _loss(head, hidden[rows].detach(), target[rows])
                gradients = torch.autograd.grad(loss, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            schedule.step()
    for parameter in parameters:
        parameter.grad = None


def own_parameters(head: EnsembleState) -> list[nn.Parameter]:
    """The vectors and biases of the nodes above the leaf groups."""
    names = [name for block in NODE_BLOCKS for name in (block.weight_name, f"{block.prefix}bias")]
    found: list[nn.Parameter | None] = [getattr(head, name) for name in names]
    return [parameter for parameter in found if parameter is not None]


def _loss(head: EnsembleState, hidden: Tensor, target: Tensor) -> Tensor:
    """-log P(leaf group of the target), the mean over contexts and trees."""
    blocks = [
        replace(block, sparse=False) for block in head.blocks() if not isinstance(block, LeafBlock)
    ]
    hidden = to_dtype_of(blocks, hidden)
    log_prob = [block.target_log_prob(hidden, target, None) for block in blocks]
    return -sum(log_prob[1:], log_prob[0]).mean()
