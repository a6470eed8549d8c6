"""The kernels of the path op, the wide op and the leaf op under emulation; see also
test_equals_reference in tests/ops/tree_op_suite.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.against_reference import check_batch
from ops.cases import CASES, LEAF, PATH, TILES, WIDE, Case, TreeOpUnderTest, name_of
from torch import Tensor

from kernels.corruption import (
    Corruption,
    check_bad_ranks,
    check_bad_targets,
    check_corruption,
    corruptions,
    sparse_is_dense,
)
from kernels.emulation import check_every_order, emulated_tests, tree_op_results

pytestmark = emulated_tests
OPS = (PATH, WIDE, LEAF)
# Several rows, nodes and features; the widest node runs the code of other cases, and takes long.
WHERE_THREADS_MEET = [
    case
    for case in (*CASES, *TILES)
    if case.rows > 1 and case.ignored < 1 and 2 < case.classes < 4200 and case.in_features > 1
]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@every_op
@pytest.mark.parametrize("case", WHERE_THREADS_MEET, ids=name_of)
def test_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, op: TreeOpUnderTest, case: Case
) -> None:
    """The visited rows of the dense gradients are the sparse ones."""
    batch = op.batch(case, case.dtypes[-1] if case.dtypes else torch.float16)

    def results() -> list[Tensor]:
        forward, dense, sparse = tree_op_results(op, batch)
        sparse_is_dense(op, batch, dense, sparse)
        return [*forward, *dense, *sparse]

    check_every_order(library, results)


@pytest.mark.parametrize(
    "case",
    [
        Case("segments of 512 rows", rows=530, trees=16, classes=3, in_features=2048),
        Case("windows of 1,024 features", rows=40, trees=2, in_features=1056, subset=1000),
    ],
    ids=name_of,
)
def test_path_op_with_the_shared_memory_of_larger_devices(
    library: EmulatedLibrary, case: Case
) -> None:
    library.set_shared_limit(227)
    check_batch(PATH, PATH.batch(case, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("op", "corruption"), [(op, each) for op in OPS for each in corruptions(op)], ids=name_of
)
def test_corrupt_tables_give_nan(op: TreeOpUnderTest, corruption: Corruption) -> None:
    check_corruption(op, corruption)


@every_op
def test_target_out_of_range_gives_nan(op: TreeOpUnderTest) -> None:
    check_bad_targets(op)


@every_op
def test_wrong_ranks_leave_log_prob_and_grad_hidden_right(op: TreeOpUnderTest) -> None:
    check_bad_ranks(op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=name_of)
def test_leaf_op_of_one_tree_equals_wide_op(dtype: torch.dtype) -> None:
    """Where the rows of the classes are those of a tree. What both ops share is equal bit for bit;
    the gradients of the weight have kernels of their own, which sum the rows in another order."""
    case = Case("groups", trees=1, rows=90, classes=40, in_features=16, widest=7)
    batch = LEAF.batch(case, dtype)
    assert batch.bias is not None
    assert batch.feature_index is not None
    order = batch.feature_index[0].long()
    own = replace(
        batch, weight=batch.weight[order][None], bias=batch.bias[:, order], feature_index=None
    )
    leaf, wide = LEAF.gradients(batch), WIDE.gradients(own)
    assert torch.equal(leaf[0], wide[0])
    assert torch.equal(leaf[1], wide[1])
    unit = torch.finfo(dtype).eps / 2
    for got, expected in ((leaf[2][order][None], wide[2]), (leaf[3][:, order], wide[3])):
        atol = 4 * unit * expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=2 * unit, atol=atol)
