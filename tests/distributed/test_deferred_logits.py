"""A deferred output layer in DistributedDataParallel and FSDP2, and with accelerate: two processes
compute no logits, and have the weights of one process with the plain layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from distributed.test_training import accelerator
from hstree import TreeEnsemble, deferred
from hstree.deferred import Source, defer_logits

V, D, STEPS = 80, 16, 5


class Model(nn.Module):
    """Computes its loss in forward, as models of transformers do."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.lm_head: Any = nn.Linear(D, V, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.body(self.embedding(tokens)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return loss, logits


def with_trees() -> Model:
    """A head of its own in the layer's place, which scores no class but those of the paths."""
    model = Model(False)
    model.lm_head = defer_logits(model.lm_head, TreeEnsemble.from_counts(D, range(1, V + 1)))
    return model


def data_parallel(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def root(model: Model) -> nn.Module:
    fully_shard(model.body)
    return fully_shard(model)


def alone(model: Model) -> nn.Module:
    """The output layer is taken back after its own call."""
    fully_shard(model.lm_head)
    return fully_shard(model)


def accelerated(model: Model) -> nn.Module:
    wrapped: nn.Module = accelerator().prepare(model)
    return wrapped


WAYS: dict[str, tuple[Callable[[Model], nn.Module], bool]] = {
    "ddp": (data_parallel, False),
    "ddp, tied": (data_parallel, True),
    "fsdp": (root, False),
    "fsdp, tied": (root, True),
    "fsdp, alone": (alone, False),
    "accelerate": (accelerated, False),
    "accelerate, tied": (accelerated, True),
}


def trained(model: Model, wrap: Callable[[Model], nn.Module] | None = None) -> list[Tensor]:
    """Weights after five steps; each process trains on its part of the texts."""
    wrapped = model if wrap is None else wrap(model)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(STEPS):
        texts = torch.randint(V, (6, 7), generator=torch.Generator().manual_seed(step))
        loss, _ = wrapped(texts.chunk(size)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def counted(name: str) -> dict[str, Any]:
    """The weights, and how often logits were computed."""
    wrap, tied = WAYS[name]
    model = Model(tied).double()
    reads: list[int] = []
    compute = Source.compute

    def count(source: Source) -> Tensor:
        reads.append(1)
        return compute(source)

    with patch.object(deferred, "LEAST", 0), patch.object(Source, "compute", count):
        defer_logits(model.lm_head)
        return {"weights": trained(model, wrap), "reads": len(reads)}


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"deferred logits, {name}": lambda name=name: counted(name) for name in WAYS
} | {"deferred logits, trees": lambda: trained(with_trees().double(), alone)}


@pytest.mark.parametrize("name", WAYS)
def test_weights_are_those_of_one_process(name: str, two: list[dict[str, Any]]) -> None:
    expected = trained(Model(WAYS[name][1]).double())
    for rank in two:
        found = rank[f"deferred logits, {name}"]
        torch.testing.assert_close(found["weights"], expected, rtol=1e-9, atol=1e-10)
        assert found["reads"] == 0


def test_a_head_of_its_own_is_sharded(two: list[dict[str, Any]]) -> None:
    expected = trained(with_trees().double())
    for rank in two:
        found = rank["deferred logits, trees"]
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
