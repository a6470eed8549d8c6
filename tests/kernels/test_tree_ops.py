"""The kernels of the path op and the group op under emulation; see also test_equals_reference in
tests/ops/test_path_log_prob.py and test_group_log_prob.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops import group_cases
from ops.against_reference import check_batch
from ops.cases import CASES, DTYPES, PATH, TILES, Case, name_of
from torch import Tensor
from torch.nn.functional import pad

from hstree import TreeEnsemble
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_groups_of_a_text(dtype: torch.dtype) -> None:
    """Rows and classes of the groups as Zipf's law makes them: most have few rows, the rows of rare
    classes many classes."""
    frequencies = 1 / np.arange(1, 1501)
    trees = TreeEnsemble.from_counts(1, frequencies, n_trees=2, clusters=64, recipe="random").below
    batch = group_cases.draw(group_cases.Case("text", 400, 2, 1500, 1, 24), dtype)
    random = np.random.default_rng(0)
    target = random.choice(1500, 400, p=frequencies / frequencies.sum())
    tables = {"cluster": trees.root_child[:, :1500], "order": trees.order, "begin": trees.begin}
    batch = replace(batch, target=torch.from_numpy(target), max_width=trees.max_group, **tables)
    group_cases.check(batch, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_groups_in_parts(dtype: torch.dtype) -> None:
    """The gradients of E are the same bits for 128 columns at a time, and with slopes of one tree
    at a time, for which max_width alone asks here."""
    classes, rows = 33_000, 2_100
    batch = group_cases.draw(group_cases.Case("parts", 20, 2, 60, 7, 133), dtype)
    rest = torch.full((2, classes - 60), 7, dtype=torch.int32)
    cluster = torch.cat([batch.cluster, rest], 1)
    order, begin, _ = group_cases.tables_of(cluster, 8)
    tables = {"cluster": cluster, "order": order, "begin": begin}
    ignored = rows - len(batch.target)
    more = replace(
        batch,
        hidden=pad(batch.hidden, (0, 0, 0, ignored)),
        weight=pad(batch.weight, (0, 0, 0, classes - 60)),
        bias=pad(batch.bias, (0, classes - 60)),
        target=pad(batch.target, (0, ignored), value=-1),
        grad=pad(batch.grad, (0, 0, 0, ignored)),
        **tables,
    )
    expected = group_results(batch)
    for got in (group_results(more), group_results(replace(more, max_width=classes))):
        sparse_is_dense(*got[1:])
        for a, b in zip(got[2], expected[2], strict=True):
            assert torch.equal(a[: len(b)], b)


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
