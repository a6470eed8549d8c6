"""The nodes above the leaf groups, fitted to contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from hstree._dtypes import sum_dtype
from hstree._progress import track
from hstree.heads.trees.blocks import Block, LeafBlock, to_dtype_of
from hstree.heads.trees.distillation import SoftTargets
from hstree.heads.trees.state import EnsembleState
from hstree.heads.trees.tree_layout import LEAF
from hstree.heads.trees.vectors import NODE_BLOCKS
from hstree.ops import mark_targets

if TYPE_CHECKING:
    from hstree.heads.softmax import Softmax

CLASS_RATE = 0.01
SOFTMAX_RATE = 0.1  # times 1 / sqrt(D)


def fit_nodes(
    head: EnsembleState,
    hidden: Tensor,
    target: Tensor | nn.Linear | Softmax,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float | None,
    seed: int,
) -> None:
    """See :meth:`hstree.heads.TreeEnsemble.fit_nodes`."""
    if head.node_vectors != "leaves":
        raise ValueError(
            "node_vectors: expected 'leaves', whose nodes above the leaf groups can be fitted "
            f"alone, got {head.node_vectors!r}"
        )
    loss = _loss(head, hidden, target)
    parameters = own_parameters(head)
    exact = not isinstance(target, Tensor) and not head.layout.n_rows[LEAF]
    if not parameters or not len(hidden) or exact:
        return
    # In float32 even where the parameters have less: a step may be below their precision.
    fitted = [parameter.detach().to(sum_dtype(parameter.dtype)) for parameter in parameters]
    rate, scale = learning_rate or CLASS_RATE, 1.0
    if not isinstance(target, Tensor):
        rate = learning_rate or SOFTMAX_RATE / head.in_features**0.5
        scale = float(hidden.square().mean(dtype=torch.float32).sqrt()) or 1.0
    vectors, biases = ([value for value in fitted if value.dim() == n] for n in (3, 2))
    groups = [{"params": vectors, "lr": rate / scale}, {"params": biases, "lr": rate}]
    optimizer = torch.optim.Adam(groups)
    steps = epochs * -(-len(hidden) // batch_size)
    schedule = CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed % 2**63)
    orders = (torch.randperm(len(hidden), generator=generator) for _ in range(epochs))
    batches = (rows for order in orders for rows in torch.split(order, batch_size))
    for rows in track(batches, "fitting the nodes", steps):
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss(rows.to(hidden.device)), parameters)
        for value, gradient in zip(fitted, gradients, strict=True):
            value.grad = gradient.to(value.dtype)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, value in zip(parameters, fitted, strict=True):
                parameter.copy_(value)


def own_parameters(head: EnsembleState) -> list[nn.Parameter]:
    """The vectors and biases of the nodes above the leaf groups."""
    names = [name for block in NODE_BLOCKS for name in (block.weight_name, f"{block.prefix}bias")]
    found: list[nn.Parameter | None] = [getattr(head, name) for name in names]
    return [parameter for parameter in found if parameter is not None]


def _loss(
    head: EnsembleState, hidden: Tensor, target: Tensor | nn.Linear | Softmax
) -> Callable[[Tensor], Tensor]:
    """The loss of a batch, the mean over its contexts and the trees, as a function of their rows
    int64 [n] in ``hidden``."""
    if isinstance(target, Tensor):
        _check_hidden(head, hidden, len(target))
        classes = mark_targets(target, head.n_classes, head.ignore_index)
        return lambda rows: _class_loss(head, hidden[rows].detach(), classes[rows])
    shape, expected = list(target.weight.shape), [head.n_classes, head.in_features]
    if shape != expected:
        raise ValueError(f"target: expected a softmax with a weight of {expected}, got {shape}")
    _check_hidden(head, hidden, len(hidden))
    soft = SoftTargets(head.layout, target)
    return lambda rows: soft.cross_entropy(
        _node_blocks(head), hidden[rows].detach(), head.feature_index
    )


def _check_hidden(head: EnsembleState, hidden: Tensor, rows: int) -> None:
    if hidden.shape != (rows, head.in_features) or not hidden.is_floating_point():
        raise ValueError(
            f"hidden: expected floating point of shape [{rows}, {head.in_features}], got "
            f"{hidden.dtype} of shape {list(hidden.shape)}"
        )


def _node_blocks(head: EnsembleState) -> list[Block]:
    """The blocks above the leaf groups, with dense gradients."""
    return [
        replace(block, sparse=False) for block in head.blocks() if not isinstance(block, LeafBlock)
    ]


def _class_loss(head: EnsembleState, hidden: Tensor, target: Tensor) -> Tensor:
    """-log P(leaf group of the target)."""
    blocks = _node_blocks(head)
    hidden = to_dtype_of(blocks, hidden)
    log_prob = [block.target_log_prob(hidden, target, None) for block in blocks]
    return -sum(log_prob[1:], log_prob[0]).mean()
