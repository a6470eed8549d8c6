"""The kernels of the leaf op under emulation."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from cuda_emu.library import ORDERS

from kernels.batches import Case, make_batch
from kernels.cases import LEAF_CASES, check, run_batch
from kernels.corruption import (
    Corruption,
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
    corruptions,
)
from kernels.emulation import ElementType, Kernels

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute

OP = "leaf"


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, kind) for case in LEAF_CASES for kind in case.kinds],
    ids=lambda value: value.name if isinstance(value, ElementType) else str(value),
)
def test_equals_reference(kernels: Kernels, case: Case, kind: ElementType) -> None:
    check(kernels, case, kind)


@pytest.mark.parametrize("case", LEAF_CASES, ids=str)
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


def test_one_tree_equals_wide_op(kernels: Kernels) -> None:
    """Where the rows of the classes are those of a tree. What both ops share is equal bit for bit;
    the gradients of the weight have kernels of their own, which sum the rows in another order."""
    case = Case("groups", trees=1, rows=90, classes=40, widest=7, leaves=True)
    for kind in case.kinds:
        batch = make_batch(case, kind)
        leaf = run_batch(kernels, batch, kind)
        leaf_class = batch.tables.leaf_class
        assert leaf_class is not None
        assert batch.bias is not None
        own = replace(
            batch,
            tables=replace(batch.tables, leaf_class=None),
            weight=batch.weight[leaf_class],
            bias=batch.bias[:, leaf_class[0]],
        )
        wide = run_batch(kernels, own, kind)
        for name in ("log_prob", "score", "grad_hidden"):
            assert getattr(leaf, name).tobytes() == getattr(wide, name).tobytes(), name
        of_leaf = (leaf.grad_weight[leaf_class], leaf.grad_bias[:, leaf_class[0]])
        for got, stored in zip(of_leaf, (wide.grad_weight, wide.grad_bias), strict=True):
            expected = kind.decode(stored)
            atol = 4 * kind.unit * np.abs(expected).max()
            np.testing.assert_allclose(kind.decode(got), expected, rtol=2 * kind.unit, atol=atol)
