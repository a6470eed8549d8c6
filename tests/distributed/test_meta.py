"""Heads that are sharded on the meta device, before they have any values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from heads.support import FREQUENCIES, D, V
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hstree.heads import Head, Softmax, TreeEnsemble
from hstree.trees import build_ensemble


def trees(binary: bool) -> TreeEnsemble:
    built = build_ensemble("huffman", V, 2, FREQUENCIES, clusters=4, binary=binary)
    options = {"subset_size": 8, "gate": "context"}
    return TreeEnsemble(D, V, built, frequencies=FREQUENCIES, **options)


def softmax() -> Softmax:
    return Softmax(D, V, frequencies=FREQUENCIES)


def sharded(make: Any) -> dict[str, Tensor]:
    with torch.device("meta"):
        head: Head = make()
    fully_shard(head)
    assert all(isinstance(parameter, DTensor) for parameter in head.parameters())
    head.to_empty(device="cpu")
    for parameter in head.parameters():
        torch.nn.init.constant_(parameter, 101.0)
    head.reset_parameters()
    state = {f"parameter {k}": p.full_tensor().detach() for k, p in head.named_parameters()}
    state |= {f"buffer {name}": buffer.clone() for name, buffer in head.named_buffers()}
    target = torch.arange(V)
    return state | {"output": head(torch.zeros(V, D), target).output.detach()}


SCENARIOS = {
    "meta groups": lambda: sharded(partial(trees, False)),
    "meta paths": lambda: sharded(partial(trees, True)),
    "meta softmax": lambda: sharded(softmax),
}


@pytest.mark.parametrize("binary", [False, True])
def test_trees(binary: bool, two: list[dict[str, Any]]) -> None:
    """Everything as in a head that was made with its values."""
    alone = trees(binary)
    for found in two:
        state = found["meta paths" if binary else "meta groups"]
        for name, parameter in alone.named_parameters():
            assert torch.equal(state[f"parameter {name}"], parameter)
        for name, buffer in alone.named_buffers():
            assert torch.equal(state[f"buffer {name}"], buffer)
        output = alone(torch.zeros(V, D), torch.arange(V)).output
        torch.testing.assert_close(state["output"], output)


def test_softmax(two: list[dict[str, Any]]) -> None:
    """The bias is that of one process. The weights are random; on a CPU torch draws the same ones
    for every part of them."""
    alone = softmax()
    states = [found["meta softmax"] for found in two]
    for state in states:
        assert torch.equal(state["parameter bias"], alone.bias)
        weight = state["parameter weight"]
        assert torch.equal(weight, states[0]["parameter weight"])
        assert 0.09 < weight.max() <= 0.1
        assert -0.1 <= weight.min() < -0.09
        assert len(weight.unique()) > 0.49 * weight.numel()
        output = alone(torch.zeros(V, D), torch.arange(V)).output
        torch.testing.assert_close(state["output"], output)
