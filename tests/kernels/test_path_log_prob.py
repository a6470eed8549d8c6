"""The tree path kernels under emulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.batches import Case, make_batch
from kernels.cases import (
    PATH_CASES,
    check,
    close,
    run_batch,
    true_forward,
    unit_of_sums,
)
from kernels.corruption import (
    Corruption,
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
    corruptions,
)
from kernels.emulation import (
    BFLOAT16,
    ELEMENT_TYPES,
    ElementType,
    Kernels,
    Tables,
    TreeOp,
)

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

OP = "path"


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in PATH_CASES for kind in case.kinds],
    ids=lambda value: value.name if isinstance(value, ElementType) else str(value),
)
def test_equals_reference(kernels: Kernels, case: Case, kind: ElementType) -> None:
    check(kernels, case, kind)


@pytest.mark.parametrize("case", PATH_CASES, ids=str)
def test_same_bits_in_every_scheduling_order(kernels: Kernels, case: Case) -> None:
    batch = make_batch(case, case.kinds[-1])
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        outputs = astuple(run_batch(kernels, batch, case.kinds[-1]))
        results.append([output.tobytes() for output in outputs])
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize(
    "index",
    [
        [*range(8), *range(16, 24)],
        range(8, 24),
        range(4, 20),
        range(12),
        [*range(7), 8, *range(16, 24)],
        [*range(8), *range(12, 20)],
        [*range(8), *range(15, 23)],
    ],
    ids=str,
)
def test_subsets_of_neighbours(kernels: Kernels, index: Sequence[int]) -> None:
    """Eight neighbours are read at once only where they begin at a multiple of eight. The subset
    of the second tree is made of single features."""
    batch = make_batch(Case("index", in_features=24, features=len(index)), BFLOAT16)
    assert batch.tables.feature_index is not None
    batch.tables.feature_index[0] = index
    log_prob, score = true_forward(batch)
    results = run_batch(kernels, batch, BFLOAT16)
    unit = unit_of_sums(BFLOAT16)
    close("score", results.score, score, len(index), unit, 0.0, 0.0)
    close("log_prob", results.log_prob, log_prob, len(index) + score.value.shape[2], unit, 0.0, 0.0)


@pytest.mark.parametrize("corruption", corruptions(OP), ids=str)
def test_corrupt_tables_give_nan(kernels: Kernels, corruption: Corruption) -> None:
    check_corruption(kernels, corruption, OP)


def test_target_out_of_range_gives_nan(kernels: Kernels) -> None:
    check_bad_targets(kernels, OP)


def test_wrong_ranks_leave_log_prob_and_grad_hidden_right(kernels: Kernels) -> None:
    check_bad_ranks(kernels, OP)


@pytest.mark.parametrize("kind", ELEMENT_TYPES, ids=lambda kind: kind.name)
def test_log_prob_at_any_score(kernels: Kernels, kind: ElementType) -> None:
    """One node, weight 1: the score is hidden. Exact to rounding in the tails, and at inf."""
    z = np.array([0, 1e-4, 1, 20, 80, 1000, 60000, np.inf])
    z = np.concatenate([z, -z])
    tables = Tables(
        target=np.tile([0, 1], len(z)),
        offset=np.array([[0, 1, 2]]),
        path=np.array([1, 0], np.int32),
        leaf_position=np.array([[0, 1]], np.int32),
        feature_index=None,
        weight_rows=1,
        in_features=1,
        stride=1,
    )
    values = kind.encode(np.repeat(z, 2)[:, None])
    weight = kind.encode(np.ones((1, 1, 1)))
    exact = kind.decode(values)[:, 0]
    signed = np.where(tables.target == 0, exact, -exact)
    op = TreeOp(kind, tables)
    log_prob, score = op.forward(values, weight, None)
    np.testing.assert_array_equal(score[:, 0, 0], exact.astype(kind.sums))
    tight = 4 * unit_of_sums(kind)
    smallest = float(np.finfo(kind.sums).tiny)
    truth = -np.logaddexp(0, -signed)
    np.testing.assert_allclose(log_prob[:, 0], truth, rtol=tight, atol=smallest)
    grad = np.ones((len(signed), 1), kind.sums)
    grad_hidden = kind.decode(op.backward(False, grad, values, weight, score)[0])[:, 0]
    small = np.exp(-np.abs(signed))
    slope = np.where(tables.target == 0, 1, -1) * np.where(signed > 0, small, 1) / (1 + small)
    limit = float(np.finfo(kind.sums).tiny) + kind.tiny
    np.testing.assert_allclose(grad_hidden, slope, rtol=tight + kind.unit, atol=limit)


@pytest.mark.parametrize("exponent", [-80, -20, 20, 80])
def test_gradients_of_any_magnitude(kernels: Kernels, exponent: int) -> None:
    """The matrix instructions take factors of 8 bits: none is lost, whatever the upstream scale."""
    batch = make_batch(PATH_CASES[0], BFLOAT16)
    plain = run_batch(kernels, batch, BFLOAT16)
    batch.grad_log_prob *= np.float32(2.0**exponent)
    scaled = run_batch(kernels, batch, BFLOAT16, plain.score)
    for name in ("grad_weight", "grad_bias", "grad_hidden"):
        got, want = (BFLOAT16.decode(getattr(result, name)) for result in (scaled, plain))
        np.testing.assert_array_equal(got, want * 2.0**exponent)
