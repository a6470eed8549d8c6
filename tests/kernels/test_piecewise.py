"""The piecewise kernels under emulation; see also tests/ops/test_piecewise.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.cases import name_of
from ops.logit_function_cases import (
    DTYPES,
    PiecewiseBatch,
    PiecewiseCase,
    increasing_table,
    off_knots,
    piecewise_batch,
    piecewise_gradients,
    place,
)
from reference.piecewise import piecewise_reference
from torch import Tensor

from kernels.emulation import bits, check_every_order, emulated_tests
from kernels.logit_cases import FEW_ELEMENTS, check_extreme_elements

pytestmark = emulated_tests
backward = torch.ops.hstree.piecewise_backward

PUBLISHED = PiecewiseCase(
    "intervals as published", shape=(1500,), intervals=100_000, radius=20.0, spread=5.0
)
# Knots at -2, -1, 0, 1, 2; the last interval is flat.
LINEAR = torch.tensor([[0.0, 1], [1, 2], [3, 0.5], [3.5, 0]])


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("case", [*FEW_ELEMENTS, PUBLISHED], ids=str)
def test_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, case: PiecewiseCase, width: int
) -> None:
    batch = piecewise_batch(case, width, (*case.dtypes, torch.float32)[0])
    check_every_order(library, lambda: piecewise_gradients(batch))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("width", [2, 4])
def test_extreme_elements_and_tables(dtype: torch.dtype, width: int) -> None:
    check_extreme_elements(dtype, width)


@pytest.mark.parametrize(("intervals", "width"), [(3057, 2), (3072, 2), (1529, 4), (1536, 4)])
def test_sums_that_leave_no_room_for_static_shared_memory(intervals: int, width: int) -> None:
    """Less than 48 KiB of dynamic shared memory, more with the static bytes of the kernel."""
    values = torch.zeros(2**21)
    table = increasing_table(intervals, width, 20.0).float()
    grad_input, grad_table = backward(torch.ones_like(values), values, table, 20.0)
    assert (grad_input == grad_input[0]).all()
    assert grad_table[:, 0].sum() == len(values)


def test_same_bits_whatever_shared_memory_there_is(library: EmulatedLibrary) -> None:
    """Room for the table, the sums (16,000 bytes) and the slopes (4,000); not for the slopes; for
    some of the sums. Only millions of elements need more than the least device has."""
    batch = piecewise_batch(PiecewiseCase("", (16_384,), intervals=1000), 2, torch.float16)
    results = []
    for kib in (227, 20, 16):
        library.set_shared_limit(kib)
        results.append(bits(piecewise_gradients(batch)))
    assert results[0] == results[1] == results[2]


# The quantum of the sums is that of the largest of a sample of grad; what is larger comes late.

LARGE = 2**18 + 5  # twice the sample


def sampled(size: int) -> Tensor:
    """Which elements of a float64 grad set the quantum, as sample_begin of piecewise.cu has it."""
    places, run = 2048, 64
    place = np.arange(places)
    spread = (place * 2654435761) % 2**32
    spread ^= spread >> 15
    begin = place * (size // places) + (spread / 2**32 * (size // places - run)).astype(np.int64)
    inside = torch.zeros(size, dtype=torch.bool)
    inside[torch.from_numpy((begin // 2 * 2)[:, None] + np.arange(run))] = True
    return inside


EARLY = sampled(LARGE)
LATE = torch.nonzero(~EARLY)[:, 0]


def usual_gradient() -> Tensor:
    return torch.from_numpy(np.random.default_rng(7).standard_normal(LARGE))


def with_outlier(grad: Tensor) -> Tensor:
    grad[LATE[-3]] = 2.0**90
    return grad


def with_some_outliers(grad: Tensor) -> Tensor:
    grad[LATE[:: len(LATE) // 500]] *= 1e3
    return grad


def one_element(grad: Tensor) -> Tensor:
    grad = torch.zeros_like(grad)
    grad[LATE[1000]] = 2.0**-1074
    return grad


def many_magnitudes(grad: Tensor) -> Tensor:
    exponent = np.random.default_rng(8).uniform(-30, 30, LARGE)
    return grad * 10.0 ** torch.from_numpy(exponent)


@pytest.mark.parametrize(
    ("change", "intervals", "width", "scale"),
    [
        (with_outlier, 6, 2, 4.0),
        (with_some_outliers, 6, 4, 4.0),
        (lambda grad: grad.masked_fill(EARLY, 0.0), 6, 2, 4.0),
        (one_element, 6, 2, 4.0),
        (many_magnitudes, 6, 2, 4.0),
        (lambda grad: grad * 2.0**-1060, 1, 2, 2.0),
    ],
    ids=[
        "one outlier near the end",
        "some outliers, cubic",
        "zero in the whole sample",
        "one element that is not zero",
        "sixty orders of magnitude",
        "one interval, subnormal",
    ],
)
def test_grad_larger_than_the_sample(
    change: Callable[[Tensor], Tensor], intervals: int, width: int, scale: float
) -> None:
    """Each error is half a quantum for each element: of N max |grad| over the sample for those up
    to that maximum, of N max |grad| for the others; either 2^-61 of it."""
    grad, random = change(usual_gradient()), np.random.default_rng(1)
    draw = lambda n: np.clip(scale * random.standard_normal(n), -19.9, 19.9)  # noqa: E731
    x = off_knots(draw, LARGE, intervals, 20.0, torch.float64)
    table = increasing_table(intervals, width, 20.0)
    batch = PiecewiseBatch(x, table, 20.0, grad)
    _, grad_input, got = piecewise_gradients(batch)
    expected = piecewise_gradients(batch, piecewise_reference)[1]
    torch.testing.assert_close(grad_input, expected, rtol=1e-12, atol=2.0**-1073)
    eps = torch.finfo(torch.float64).eps
    where = place(x, table, 20.0, eps)
    limit = grad[EARLY].abs().max()
    late = grad.abs() > limit
    true = np.zeros((intervals, width), np.longdouble)
    terms, bound = true.copy(), true.copy()
    u = x.numpy().astype(np.longdouble) * (intervals / 40) + (
        intervals / 2 - where.interval.numpy()
    )
    weight = grad.numpy().astype(np.longdouble)[:, None] * u[:, None] ** np.arange(width)
    np.add.at(true, where.interval.numpy(), weight)
    np.add.at(terms, where.interval.numpy(), np.abs(weight))
    for which, size in ((~late, limit), (late, grad.abs().max())):
        count = np.bincount(where.interval[which].numpy(), minlength=intervals)
        quantum = LARGE * np.longdouble(float(size)) * np.longdouble(2.0) ** -61
        bound += (count * quantum / 2)[:, None]
    error = np.abs(got.numpy() - true)
    assert (error <= bound + 2 * eps * terms + 2.0**-1074).all()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_grad_not_finite_beside_the_sample(bad: float) -> None:
    grad = torch.ones(LARGE).double()
    grad[LATE[5]] = bad
    x = torch.full_like(grad, 0.5)
    assert backward(grad, x, LINEAR.double(), 2.0)[1].isnan().all()


def test_same_bits_with_late_elements(library: EmulatedLibrary) -> None:
    """More late elements than the list of a block holds, and few."""
    x, grad = torch.linspace(-1.9, 1.9, LARGE).double(), usual_gradient()
    grad[LATE[:20_000]] *= 1e3
    grad[LATE[-40:]] *= 1e6
    check_every_order(library, lambda: backward(grad, x, LINEAR.double(), 2.0))


def test_sample_is_spread_over_the_whole_array() -> None:
    share = EARLY[: LARGE // 16 * 16].view(16, -1).double().mean(1)
    assert ((share - 1 / 2).abs() < 0.01).all()
