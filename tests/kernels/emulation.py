"""Results of emulated operators, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from cuda_emu.library import ORDERS, EmulatedLibrary
from ops.cases import Batch, TreeOpUnderTest
from torch import Tensor

# The kernels are compiled first, for a minute.
emulated_tests = [pytest.mark.slow, pytest.mark.usefixtures("library")]


def bits(tensors: Iterable[Tensor]) -> list[bytes]:
    return [x.contiguous().flatten().view(torch.uint8).numpy().tobytes() for x in tensors]


def check_every_order(library: EmulatedLibrary, compute: Callable[[], Iterable[Tensor]]) -> None:
    """The same bits, whichever thread and block goes first, and no race."""
    with library.watching_races():
        results = [bits(compute())]
    for order in ORDERS[1:]:
        library.set_order(*order)
        results.append(bits(compute()))
    assert all(result == results[0] for result in results[1:])


def tree_op_results(op: TreeOpUnderTest, batch: Batch) -> tuple[tuple[Tensor, ...], ...]:
    """Of forward, and of dense and of sparse backward."""
    forward = op.operator(*batch.arguments())
    batch = replace(batch, grad=batch.grad.to(forward[0].dtype))
    dense, sparse = (op.backward(batch, *forward[1:], sparse=sparse) for sparse in (False, True))
    return forward, dense, sparse
