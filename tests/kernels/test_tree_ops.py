"""The kernels of the path op and the group op under emulation; see also test_equals_reference in
tests/ops/test_path_log_prob.py and test_group_log_prob.py."""

from __future__ import annotations

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops import group_cases
from ops.against_reference import check_batch
from ops.cases import CASES, DTYPES, PATH, TILES, Case, name_of
from torch import Tensor

from kernels.corruption import (
    CORRUPTIONS,
    Corruption,
    check_bad_ranks,
    check_bad_targets,
    check_bad_targets_of_groups,
    check_corrupt_groups,
    check_corruption,
)
from kernels.emulation import (
    check_every_order,
    emulated_tests,
    group_results,
    path_results,
    sparse_is_dense,
)

pytestmark = emulated_tests
# Several rows, nodes and features.
WHERE_THREADS_MEET = [
    case
    for case in (*CASES, *TILES)
    if case.rows > 1 and case.ignored < 1 and case.classes > 2 and case.in_features > 1
]
GROUPS = [
    case
    for case in (*group_cases.CASES, *group_cases.TILES)
    if case.rows > 1 and case.ignored < 1 and case.clusters < case.classes and case.features > 1
]


@pytest.mark.parametrize("case", WHERE_THREADS_MEET, ids=name_of)
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: Case) -> None:
    """The visited rows of the dense gradients are the sparse ones."""
    batch = PATH.batch(case, case.dtypes[-1] if case.dtypes else torch.float16)

    def results() -> list[Tensor]:
        forward, dense, sparse = path_results(batch)
        sparse_is_dense(dense, sparse)
        return [*forward, *dense, *sparse]

    check_every_order(library, results)


@pytest.mark.parametrize("case", GROUPS, ids=name_of)
def test_groups_have_the_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, case: group_cases.Case
) -> None:
    batch = group_cases.draw(case, case.dtypes[-1] if case.dtypes else torch.float16)

    def results() -> list[Tensor]:
        forward, dense, sparse = group_results(batch)
        if batch.bias is not None:
            sparse_is_dense(dense, sparse)
        return [*forward, *dense, *sparse]

    check_every_order(library, results)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", [*group_cases.CASES, *group_cases.TILES], ids=name_of)
def test_groups_equal_the_reference(case: group_cases.Case, dtype: torch.dtype) -> None:
    if case.rows * case.features < 5_000:  # emulation is slow
        group_cases.check(group_cases.draw(case, dtype), torch.device("cpu"))


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
    check_batch(PATH.batch(case, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize("corruption", CORRUPTIONS, ids=name_of)
def test_corrupt_tables_give_nan(corruption: Corruption) -> None:
    check_corruption(corruption)


def test_target_out_of_range_gives_nan() -> None:
    check_bad_targets()
    check_bad_targets_of_groups()


def test_corrupt_groups() -> None:
    for seed in range(60):
        check_corrupt_groups(seed)


def test_wrong_ranks_leave_log_prob_and_grad_hidden_right() -> None:
    check_bad_ranks()
