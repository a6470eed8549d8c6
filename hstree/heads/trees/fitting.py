"""The nodes above the leaf groups, fitted to contexts and the classes that follow them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from hstree._numerics import sum_dtype
from hstree._progress import track
from hstree.heads.trees.layout import Layout
from hstree.heads.trees.nodes import LeafBlock, Nodes, to_dtype_of


def fit_nodes(
    nodes: Nodes,
    layout: Layout,
    hidden: Tensor,
    target: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> None:
    """See :meth:`hstree.heads.TreeEnsemble.fit_nodes`: hidden [N, D], and classes int64 [N] of
    :func:`hstree.ops.mark_targets`."""
    parameters = list(nodes.own_parameters().values())
    if not parameters or not len(hidden):
        return
    # In float32 even where the parameters have less: a step may be below their precision.
    fitted = [parameter.detach().to(sum_dtype(parameter.dtype)) for parameter in parameters]
    optimizer = torch.optim.Adam(fitted, lr=learning_rate)
    steps = epochs * -(-len(hidden) // batch_size)
    schedule = CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed % 2**63)
    orders = (torch.randperm(len(hidden), generator=generator) for _ in range(epochs))
    batches = (rows for order in orders for rows in torch.split(order, batch_size))
    for rows in track(batches, "fitting the nodes", steps):
        rows = rows.to(hidden.device)
        with torch.enable_grad():
            loss = _loss(nodes, layout, hidden[rows].detach(), target[rows])
            gradients = torch.autograd.grad(loss, parameters)
        for value, gradient in zip(fitted, gradients, strict=True):
            value.grad = gradient.to(value.dtype)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, fitted, strict=True):
                parameter.copy_(value)


def _loss(nodes: Nodes, layout: Layout, hidden: Tensor, target: Tensor) -> Tensor:
    """-log P(leaf group of the target), the mean over contexts and trees."""
    above = (block for block in nodes(layout) if not isinstance(block, LeafBlock))
    blocks = [replace(block, sparse=False) for block in above]  # with dense gradients
    hidden = to_dtype_of(blocks, hidden)
    log_prob = [block.target_log_prob(hidden, target, None) for block in blocks]
    loss: Tensor = -sum(log_prob[1:], log_prob[0]).mean()
    return loss
