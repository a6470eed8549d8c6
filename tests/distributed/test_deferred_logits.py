"""A deferred output layer under DistributedDataParallel and FSDP2: the weights of the plain layer
after three steps, and no logits computed."""

from __future__ import annotations

import copy
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

from hstree import TreeEnsemble, deferred
from hstree.deferred import Source, defer_logits

V, D = 80, 16


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
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss, logits


def data_parallel(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def root(model: Model) -> nn.Module:
    fully_shard(model.body)
    fully_shard(model)
    return model


def alone(model: Model) -> nn.Module:
    """The output layer is taken back after its own call."""
    fully_shard(model.lm_head)
    fully_shard(model)
    return model


WAYS: dict[str, tuple[Callable[[Model], nn.Module], bool]] = {
    "ddp": (data_parallel, False),
    "ddp, tied": (data_parallel, True),
    "fsdp": (root, False),
    "fsdp, tied": (root, True),
    "fsdp, alone": (alone, False),
}


def trained(model: Model, wrap: Callable[[Model], nn.Module]) -> list[Tensor]:
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        tokens = torch.randint(
            V, (3, 7), generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
        )
        loss, _ = wrapped(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def compared(name: str) -> dict[str, Any]:
    wrap, tied = WAYS[name]
    plain = Model(tied)
    model = copy.deepcopy(plain)
    reads: list[int] = []
    compute = Source.compute

    def counted(source: Source) -> Tensor:
        reads.append(1)
        return compute(source)

    with patch.object(deferred, "LEAST", 0), patch.object(Source, "compute", counted):
        defer_logits(model.lm_head)
        return {"found": trained(model, wrap), "plain": trained(plain, wrap), "reads": len(reads)}


def trees() -> dict[str, Any]:
    """A head of its own in the layer's place, which scores no class but those of the paths."""
    plain = Model(False)
    plain.lm_head = defer_logits(plain.lm_head, TreeEnsemble.from_counts(D, range(1, V + 1)))
    model = copy.deepcopy(plain)
    return {"found": trained(model, alone), "plain": trained(plain, data_parallel)}


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"deferred logits, {name}": lambda name=name: compared(name) for name in WAYS
} | {"deferred logits, trees": trees}


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_steps_are_those_of_the_plain_layer(name: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        result = rank[f"deferred logits, {name}"]
        torch.testing.assert_close(result["found"], result["plain"])
        assert result["reads"] == 0


@pytest.mark.slow
def test_a_head_of_its_own_is_sharded(two: list[dict[str, Any]]) -> None:
    result = two[0]["deferred logits, trees"]
    torch.testing.assert_close(result["found"], result["plain"])
