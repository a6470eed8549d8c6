"""A small model with row-sparse or dense gradients, its batches, and its training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree.heads import TreeEnsemble
from hstree.optim import AdamW
from hstree.trees import build_ensemble

D, V, N = 12, 40, 16
FREQUENCIES = np.random.default_rng(0).zipf(1.5, V).astype(np.int64)
NoSync = Callable[[], AbstractContextManager[Any]]


def tree_head(n_trees: int = 2, seed: int = 3, **options: Any) -> TreeEnsemble:
    """Root, wide and binary nodes; vectors that are not zero."""
    options = {"subset_size": 8, "gate": "context", **options}
    vectors = np.random.default_rng(1).standard_normal((V, 6))
    trees = build_ensemble("cluster", V, n_trees, FREQUENCIES, [vectors], seed, 4, 3, noise=0.5)
    head = TreeEnsemble(D, V, trees, frequencies=FREQUENCIES, **options)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=random)
    return head


class Model(nn.Module):
    """Tokens [N] to the loss of their successors, or, without a target, to a penalty of the
    linear layer, in which neither embedding nor head has a part."""

    def __init__(self, head: nn.Module, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D, sparse=sparse)
        self.linear = nn.Linear(D, D)
        self.head = head

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens)).tanh()  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, target: Tensor | None) -> dict[str, Tensor]:
        if target is None:
            return {"loss": self.linear.weight.square().sum()}
        return {"loss": self.head(self.hidden(tokens), target).loss}


def model(sparse: bool, seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(tree_head(sparse=sparse, **options), sparse).double()


def batches(steps: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield (
            torch.randint(V, (N,), generator=random),
            torch.randint(V, (N,), generator=random),
        )


def my_part(tensor: Tensor) -> Tensor:
    """Of a batch, this rank's rows; without a process group, all."""
    if not dist.is_initialized():
        return tensor
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    module: nn.Module,
    no_sync: NoSync = nullcontext,
    parts: int = 1,
    part: Callable[[Tensor], Tensor] = my_part,
) -> Tensor:
    """Losses of three steps, each accumulated over parts of the rank's part of the batch."""
    losses, optimizer = [], AdamW(module.parameters(), 0.1)
    for tokens, target in batches():
        tokens, target = part(tokens), part(target)
        loss = torch.zeros((), dtype=torch.float64)
        pieces = list(zip(tokens.chunk(parts), target.chunk(parts), strict=True))
        for number, piece in enumerate(pieces):
            with no_sync() if number + 1 < parts else nullcontext():
                of_piece = module(*piece)["loss"] / parts
                of_piece.backward()
            loss += of_piece.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return torch.stack(losses)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone()
        for name, p in module.named_parameters()
    }
