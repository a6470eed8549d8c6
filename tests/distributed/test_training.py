"""Every dense head in torch's DistributedDataParallel and FSDP2, and with accelerate: two processes
with half of each batch have the weights of one process with all of it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from heads.support import HEADS, D, V, make
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

STEPS, N = 5, 64
DENSE = [kind for kind in HEADS if "sparse" not in kind]
SPARSE = [kind for kind in HEADS if "sparse" in kind]


class Model(nn.Module):
    """Features [N, D] and their classes to the loss, which wrappers want of forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(D, D)
        self.head = make(kind)
        self.double()

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return self.head(self.body(features).tanh(), target).loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    features = torch.randn(N, D, generator=random, dtype=torch.float64)
    return features, torch.randint(V, (N,), generator=random)


def train(module: nn.Module) -> None:
    """Each process trains on its part of the rows."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.5, momentum=0.9)
    for step in range(STEPS):
        features, target = (whole.chunk(size)[rank] for whole in batch(step))
        module(features, target).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def result(model: Model) -> dict[str, Tensor]:
    """Weights, and probabilities that are asked of the head itself."""
    found = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    with torch.no_grad():
        return found | {"log_prob": model.head.log_prob(batch(STEPS)[0])}


def data_parallel(model: Model) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=model.head.may_skip_parameters)


def sharded(model: Model) -> nn.Module:
    fully_shard(model.head)
    register_fsdp_forward_method(model.head, "log_prob")
    return fully_shard(model)


@functools.cache
def accelerator() -> Any:
    """Of accelerate, in the processes of :func:`distributed.processes.launch`."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    made = Accelerator(cpu=True, kwargs_handlers=[unused])
    assert made.num_processes == dist.get_world_size()
    return made


def accelerated(model: Model) -> nn.Module:
    wrapped: nn.Module = accelerator().prepare(model)
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


WAYS: dict[str, Callable[[Model], nn.Module]] = {
    "ddp": data_parallel,
    "fsdp": sharded,
    "accelerate": accelerated,
}


def trained(kind: str, way: str) -> dict[str, Tensor]:
    model = Model(kind)
    train(WAYS[way](model))
    return result(model)


def refusals(kind: str) -> list[str]:
    """What a head with row-sparse gradients says, whatever wraps it; and it is evaluated."""
    found = []
    for wrap in (data_parallel, sharded):
        model = Model(kind)
        wrapped = wrap(model)
        with torch.no_grad():
            assert wrapped(*batch(0)).isfinite()
        with pytest.raises(ValueError, match="sparse: ") as error:
            wrapped(*batch(0))
        found.append(str(error.value))
    return found


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"{kind}: {way}": functools.partial(trained, kind, way) for kind in DENSE for way in WAYS
} | {f"{kind}: refused": functools.partial(refusals, kind) for kind in SPARSE}

Found = list[dict[str, Any]]


@pytest.mark.parametrize("kind", DENSE)
def test_weights_are_those_of_one_process(kind: str, two: Found) -> None:
    model = Model(kind)
    before = result(model)
    train(model)
    expected = result(model)
    changed = [name for name, value in before.items() if not torch.equal(value, expected[name])]
    assert set(changed) >= {name for name, p in model.named_parameters() if p.requires_grad}
    for found in two:
        for way in WAYS:
            got = found[f"{kind}: {way}"]
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", SPARSE)
def test_row_sparse_gradients_are_refused(kind: str, two: Found) -> None:
    for found in two:
        for message in found[f"{kind}: refused"]:
            assert message.startswith("sparse: expected False in training with 2 processes")
            assert message.endswith("got True")
