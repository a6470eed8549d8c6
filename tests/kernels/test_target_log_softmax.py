"""The target_log_softmax kernels under emulation; see also tests/ops/test_target_log_softmax.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cuda_emu.library import EmulatedLibrary
from ops.cases import name_of
from ops.logit_function_cases import (
    CPU,
    EDGES,
    FUNCTIONS,
    MonotoneBatch,
    MonotoneCase,
    check_bias,
    check_low_rows,
    check_monotone,
    monotone_batch,
    monotone_gradients,
)

from kernels.emulation import bits, check_every_order, emulated_tests
from kernels.logit_cases import check_misaligned_rows, check_spoilt_rows

pytestmark = emulated_tests

KINDS = [MonotoneCase(name, **options) for name, options in FUNCTIONS]  # type: ignore[arg-type]
every_kind = pytest.mark.parametrize("case", KINDS, ids=str)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)


@pytest.mark.parametrize(
    "case", [*KINDS, *EDGES, MonotoneCase("zero rows", rows=0, intervals=10)], ids=str
)
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: MonotoneCase) -> None:
    batch = monotone_batch(case, torch.float32)
    check_every_order(library, lambda: monotone_gradients(batch))


@dtypes
@pytest.mark.parametrize(("width", "classes"), [(2, 33), (4, 33), (2, 1023), (2, 1025)])
def test_same_bits_at_every_alignment(dtype: torch.dtype, width: int, classes: int) -> None:
    case = MonotoneCase("", rows=5, classes=classes, intervals=12, width=width)
    check_misaligned_rows(case, dtype)


@dtypes
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("rows", "classes"), [(8, 500), (1, 30_000)])  # warps and a block
def test_same_bits_whatever_the_window(
    library: EmulatedLibrary, rows: int, classes: int, width: int, dtype: torch.dtype
) -> None:
    """Sums in shared memory for some of the intervals, at 227 KiB for more of them than at 99."""
    case = MonotoneCase("", rows, classes, intervals=40_000 // width, width=width, ignored=0.0)
    results = []
    for kib in (99, 227):
        library.set_shared_limit(kib)
        check_monotone(case, dtype, CPU)
        results.append(bits(monotone_gradients(monotone_batch(case, dtype))))
    assert results[0] == results[1]


LONG = [MonotoneCase("many", rows=3, classes=size) for size in (1500, 6000, 16_390)]


@pytest.mark.parametrize("case", [*KINDS, *LONG], ids=str)
def test_rounded_to_16_bits(case: MonotoneCase) -> None:
    check_low_rows(case, CPU)


@dtypes
@pytest.mark.parametrize("case", [*KINDS, MonotoneCase("many", rows=3, classes=1503)], ids=str)
def test_bias(case: MonotoneCase, dtype: torch.dtype) -> None:
    check_bias(case, dtype, CPU)


@pytest.mark.parametrize("classes", [900, 9000])  # a warp and a block
@pytest.mark.parametrize("order", ["rising", "falling", "late", "early"])
def test_logits_in_any_order(order: str, classes: int) -> None:
    """The largest so far changes in every step, or in the last one, which has nearly all mass."""
    x = torch.linspace(-60, 60, classes)
    if order in ("late", "early"):
        x = torch.zeros(classes).index_fill_(0, torch.tensor(classes - 1), 20.0)
    if order in ("falling", "early"):
        x = x.flip(0)
    true = x.double().log_softmax(0)
    for place in (0, classes // 2, classes - 1):
        batch = MonotoneBatch(x[None].clone(), torch.tensor([place]), 0, 1, None, 1, torch.ones(1))
        for at_once in (False, True):
            log_prob, _, grad = monotone_gradients(batch, at_once)
            assert abs(log_prob - true[place]) <= 3e-7 * abs(true[place])
            expected = F.one_hot(torch.tensor(place), classes) - true.exp()
            # A normalizer that was kept is rounded to float32.
            error = (grad[0] - expected).abs().max()
            assert error <= (2e-7 if at_once else 5e-6)


@dtypes
@every_kind
def test_spoilt_rows(case: MonotoneCase, dtype: torch.dtype) -> None:
    check_spoilt_rows(case, dtype)


@dtypes
@pytest.mark.parametrize("classes", [33, 1025])  # a warp and a block for each row
@every_kind
def test_rows_without_a_finite_result(case: MonotoneCase, classes: int, dtype: torch.dtype) -> None:
    """NaN, +inf or nothing but -inf in a row: NaN in that row and in row 0 of the table alone."""
    batch = monotone_batch(replace(case, rows=8, classes=classes, ignored=0.0), dtype)
    x = batch.logits
    x[1, 7], x[2, 30], x[3], x[4, 3], x[4, 4] = math.nan, math.inf, -math.inf, -math.inf, math.nan
    log_prob, log_normalizer, grad, *grad_table = monotone_gradients(batch)
    bad = torch.tensor([False, *[True] * 4, *[False] * 3])
    assert torch.equal(log_prob.isnan(), bad)
    assert torch.equal(log_normalizer.isnan(), bad)
    assert torch.equal(grad.isnan(), bad[:, None].expand_as(grad))
    for sums in grad_table:
        assert sums[0].isnan().all()
        assert sums[1:].isfinite().all()
