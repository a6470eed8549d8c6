"""What no function and no forward pass gives, and rows at any address, for piecewise and
target_log_softmax; for the tests and sanitized.py."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from ops.logit_function_cases import (
    PIECEWISE_CASES,
    MonotoneCase,
    accumulate,
    monotone_batch,
)

from kernels.emulation import bits

ops = torch.ops.hstree
# Without those that an emulator takes seconds for.
FEW_ELEMENTS = [
    case for case in PIECEWISE_CASES if math.prod(case.shape) < 10**5 and case.intervals < 10**4
]
BAD_TARGETS = (-2, -(2**63), 33, 2**31, 2**62, 2**63 - 1)


def check_extreme_elements(dtype: torch.dtype, width: int) -> None:
    """No element, no table and no radius leads outside the table; a NaN element spoils row 0."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([0.0, 1e-30, largest, math.nan, math.inf, 2.0, 1.0]).double()
    x = torch.cat([x, -x]).to(dtype)
    table = torch.tensor([math.nan, math.inf, -math.inf, 1.0][:width], dtype=accumulate(dtype))
    table = table.repeat(5, 1)
    for radius in (1.0, 1e-30, 1e30):
        ops.piecewise(x, table, radius)
        _, grad_table = ops.piecewise_backward(torch.ones_like(x), x, table, radius)
        assert grad_table[0].isnan().all()


def check_spoilt_rows(case: MonotoneCase, dtype: torch.dtype) -> None:
    """Targets out of range and a log_normalizer that no forward pass gives: NaN in their rows and
    in row 0 of the table, nothing elsewhere."""
    batch = monotone_batch(replace(case, rows=14, classes=33, ignored=0.0), dtype)
    batch.target[:9] = torch.tensor((*BAD_TARGETS, -1, 0, 32))
    log_prob, log_normalizer = ops.target_log_softmax(*batch.arguments())
    bad = torch.arange(14) < 6
    assert torch.equal(log_prob.isnan(), bad)
    log_normalizer[9:] = torch.tensor((math.nan, math.inf, -math.inf, 1e30, -1e30))
    bad[9:12] = True
    buffer = torch.full((14 * 33 + 8,), 12345.0, dtype=dtype)
    inside = buffer[4:-4].view(14, 33)
    inside.copy_(batch.logits)
    grad_table = ops.target_log_softmax_backward_(
        inside, batch.grad, batch.target, log_normalizer, *batch.arguments()[2:]
    )
    assert torch.equal(inside.isnan(), bad[:, None].expand(14, 33))
    assert (torch.cat([buffer[:4], buffer[-4:]]) == 12345).all()
    if batch.table is not None:
        assert grad_table[0].isnan().all()
        assert grad_table[1:].isfinite().all()


def check_misaligned_rows(case: MonotoneCase, dtype: torch.dtype) -> None:
    """Rows that begin at any element: the same bits."""
    batch = monotone_batch(case, dtype)
    results = []
    for shift in range(4):
        longer = torch.cat([batch.logits.new_zeros(shift), batch.logits.flatten()])
        moved = longer[shift:].view_as(batch.logits)
        rest = batch.arguments()[2:]
        log_prob, log_normalizer = ops.target_log_softmax(moved, batch.target, *rest)
        grad_table = ops.target_log_softmax_backward_(
            moved, batch.grad, batch.target, log_normalizer, *rest
        )
        results.append(bits((log_prob, log_normalizer, moved, grad_table)))
    assert all(result == results[0] for result in results[1:])
