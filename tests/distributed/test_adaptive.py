"""The adaptive softmax under torch's DDP, where a step may have no class of a cluster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hstree.heads import AdaptiveSoftmax

D, V = 16, 80


def my_half(rows: torch.Tensor) -> torch.Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def head() -> AdaptiveSoftmax:
    torch.manual_seed(0)
    return AdaptiveSoftmax(D, V, cutoffs=[10, 20], div_value=2.0).double()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """No target of the first half is in a cluster, those of the second half are in all."""
    random = torch.Generator().manual_seed(2)
    hidden = torch.randn(16, D, generator=random, dtype=torch.float64)
    return hidden, torch.cat([torch.arange(8), torch.arange(0, V, V // 8)])


def a_cluster_on_one_rank() -> dict[str, Any]:
    wrapped = nn.parallel.DistributedDataParallel(head(), find_unused_parameters=True)
    hidden, target = map(my_half, batch())
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(hidden, target).loss.backward()
    return gradients(wrapped.module)


def a_cluster_on_no_rank() -> str:
    wrapped = nn.parallel.DistributedDataParallel(head())
    hidden, target = (values[:8] for values in batch())
    wrapped(hidden, target).loss.backward()
    with pytest.raises(RuntimeError, match="find_unused_parameters=True") as error:
        wrapped(hidden, target)
    return str(error.value)


SCENARIOS = {
    "adaptive on one rank": a_cluster_on_one_rank,
    "adaptive on no rank": a_cluster_on_no_rank,
}


def test_unused_clusters_must_be_looked_for(two: list[dict[str, Any]]) -> None:
    for found in two:
        assert "did not receive grad" in found["adaptive on no rank"]


def test_gradients_are_those_of_one_process(two: list[dict[str, Any]]) -> None:
    assert not dist.is_initialized()
    alone = head()
    alone(*batch()).loss.backward()
    for found in two:
        torch.testing.assert_close(found["adaptive on one rank"], gradients(alone))
