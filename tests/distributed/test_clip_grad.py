"""Gradients on several ranks are clipped as those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from distributed.models import Model, batches, model, my_part
from distributed.test_fully_shard import full, sharded
from hstree.distributed import clip_grad_norm_, shard_trees

CASES = [(max_norm, norm_type) for max_norm in (0.1, 100.0) for norm_type in (2.0, 1.0, math.inf)]


def clipped(make: Callable[[], Model], part: Callable[[Tensor], Tensor]) -> list[dict[str, Any]]:
    found = []
    for max_norm, norm_type in CASES:
        made = make()
        tokens, target = map(part, next(batches()))
        made(tokens, target)["loss"].backward()
        norm = clip_grad_norm_(made, max_norm, norm_type)
        gradients = {name: full(p.grad) for name, p in made.named_parameters()}
        found.append({"norm": norm, **gradients})
    return found


def by_trees() -> Model:
    made = model(sparse=True, n_trees=4)
    made.head = shard_trees(made.head, init_device_mesh("cpu", (2,)))
    return made


def not_finite() -> str:
    made = by_trees()
    made(*next(batches()))["loss"].backward()
    if dist.get_rank() == 1:
        gradient = made.head.nodes.root_weight.grad
        gradient[0, 0, 0] = math.nan
    before = full(made.linear.weight.grad)
    with pytest.raises(RuntimeError, match="error_if_nonfinite") as error:
        clip_grad_norm_(made, 0.1, error_if_nonfinite=True)
    assert torch.equal(before, made.linear.weight.grad)
    return str(error.value)


SCENARIOS = {
    "clip fsdp": lambda: clipped(lambda: sharded(sparse=True), my_part),
    "clip trees": lambda: clipped(by_trees, lambda tensor: tensor),
    "clip not finite": not_finite,
}

Found = list[dict[str, Any]]


def expected(n_trees: int) -> list[dict[str, Any]]:
    """By torch, of dense gradients."""
    found = []
    for max_norm, norm_type in CASES:
        alone = model(sparse=False, n_trees=n_trees)
        alone(*next(batches()))["loss"].backward()
        norm = nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
        found.append({"norm": norm, **{name: full(p.grad) for name, p in alone.named_parameters()}})
    return found


def test_fully_sharded(two: Found) -> None:
    for found in two:
        torch.testing.assert_close(found["clip fsdp"], expected(2), rtol=0, atol=1e-12)


def test_sharded_trees(two: Found) -> None:
    for rank, found in enumerate(two):
        for mine, all_trees in zip(found["clip trees"], expected(4), strict=True):
            for name, value in mine.items():
                wanted = all_trees[name.replace("gate.whole.", "gate.")]
                if name.startswith("head.") and "gate" not in name:
                    wanted = wanted[2 * rank : 2 * rank + 2, : value.shape[1]]
                torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


def test_a_norm_that_is_not_finite(two: Found) -> None:
    for found in two:
        assert found["clip not finite"].endswith("got nan")
