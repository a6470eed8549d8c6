"""Results of emulated operators, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from cuda_emu.library import ORDERS, EmulatedLibrary
from ops import group_cases
from ops.cases import PATH, Batch
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


def path_results(batch: Batch) -> tuple[tuple[Tensor, ...], ...]:
    """Of forward, and of dense and of sparse backward."""
    forward = PATH.operator(*batch.arguments())
    batch = replace(batch, grad=batch.grad.to(forward[0].dtype))
    dense, sparse = (PATH.backward(batch, forward[1:], sparse=sparse) for sparse in (False, True))
    return forward, dense, sparse


def group_results(batch: group_cases.Batch) -> tuple[tuple[Tensor, ...], ...]:
    """The same of the group op."""
    forward = group_cases.FORWARD(*batch.arguments())
    batch = replace(batch, grad=batch.grad.to(forward[0].dtype))
    dense, sparse = (
        group_cases.backward(batch, forward[1:], sparse=sparse) for sparse in (False, True)
    )
    return forward, dense, sparse


def sparse_is_dense(dense: tuple[Tensor, ...], sparse: tuple[Tensor, ...]) -> None:
    """Bit for bit: the visited rows are the dense rows, all others are zero; sorted, no repeats."""
    assert torch.equal(sparse[0], dense[0])
    _, of_weight, of_bias, *indices = sparse
    for where, values, whole in (
        (indices[0], of_weight, dense[1]),
        (indices[-1], of_bias, dense[2]),
    ):
        assert torch.equal(whole[tuple(where)], values)
        rest = whole.index_put(tuple(where), torch.zeros_like(values))
        assert not rest.any()
        flat = where[0] if len(where) == 1 else where[0] * whole.shape[1] + where[1]
        assert (flat.diff() > 0).all()
