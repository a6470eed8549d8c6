"""The wide kernels under emulation."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.batches import Case, make_batch
from kernels.cases import WIDE_CASES, check, run_batch
from kernels.corruption import (
    Corruption,
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
    corruptions,
)
from kernels.emulation import FLOAT64, ElementType, Kernels

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

OP = "wide"


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in WIDE_CASES for kind in case.kinds],
    ids=lambda value: value.name if isinstance(value, ElementType) else str(value),
)
def test_equals_reference(kernels: Kernels, case: Case, kind: ElementType) -> None:
    check(kernels, case, kind)


@pytest.mark.parametrize("case", WIDE_CASES, ids=str)
def test_same_bits_in_every_scheduling_order(kernels: Kernels, case: Case) -> None:
    batch = make_batch(case, case.kinds[-1])
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        outputs = astuple(run_batch(kernels, batch, case.kinds[-1]))
        results.append([output.tobytes() for output in outputs])
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("corruption", corruptions(OP), ids=str)
def test_corrupt_tables_give_nan(kernels: Kernels, corruption: Corruption) -> None:
    check_corruption(kernels, corruption, OP)


def test_target_out_of_range_gives_nan(kernels: Kernels) -> None:
    check_bad_targets(kernels, OP)


def test_wrong_ranks_leave_log_prob_and_grad_hidden_right(kernels: Kernels) -> None:
    check_bad_ranks(kernels, OP)


def test_one_node_equals_log_softmax(kernels: Kernels) -> None:
    """One wide node over all classes is the flat softmax, also where scores differ by thousands."""
    batch = make_batch(
        Case("flat", classes=30, shape="flat", widest=30, trees=1, scale=30), FLOAT64
    )
    assert batch.bias is not None
    logits = batch.hidden @ batch.weight[0].T + batch.bias[0]
    shifted = logits - logits.max(1, keepdims=True)
    truth = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    results = run_batch(kernels, batch, FLOAT64)
    used = batch.tables.target >= 0
    child = batch.tables.leaf_position[0][batch.tables.target]
    np.testing.assert_allclose(results.score[used, 0], truth[used], rtol=1e-12, atol=1e-12)
    expected = truth[np.arange(len(child)), child][used]
    np.testing.assert_allclose(results.log_prob[used, 0], expected, rtol=1e-12, atol=1e-12)
