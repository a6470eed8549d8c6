"""The kernels of tree_log_softmax under emulation; see also tests/ops/test_tree_log_softmax.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emu.library import ORDERS
from ops import test_leaf_tree_log_softmax as leaf_ops
from ops.test_tree_log_softmax import BLOCKS, Case, draw, mixed

from kernels.emulation import Kernels
from kernels.tree_log_softmax_cases import (
    check_corrupt_leaf_tables,
    check_corrupt_tables,
    leaf_log_prob,
    log_prob,
)

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute


def test_threads_of_several_nodes(kernels: Kernels) -> None:
    """Enough nodes and rows for chunks of four nodes."""
    case = Case("large", ("random", "random"), classes=4200, widest=2, rows=130)
    batch = draw(case, torch.float32)
    torch.testing.assert_close(log_prob(batch), mixed(batch), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_same_bits_in_every_scheduling_order(kernels: Kernels, case: Case) -> None:
    batch = draw(case, torch.float32)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(log_prob(batch))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_bad_scores_stay_in_their_row(kernels: Kernels, value: float) -> None:
    batch = draw(BLOCKS[2], torch.float32)
    score = batch.score.clone()
    score[0, :, 3] = value
    got, clean = log_prob(replace(batch, score=score)), log_prob(batch)
    others = torch.arange(len(got)) != 3
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all()


def test_classes_without_a_path_are_nan(kernels: Kernels) -> None:
    batch = draw(BLOCKS[3], torch.float64)
    edge = batch.edge.clone()
    lost = int((edge[1, :, 1] == ~7).nonzero())
    edge[1, lost, 1] = ~60  # one more than there are
    got, clean = log_prob(replace(batch, edge=edge)), log_prob(batch)
    others = torch.arange(60) != 7
    assert torch.equal(got[:, others], clean[:, others])
    assert got[:, 7].isnan().all()


def test_corrupt_tables(kernels: Kernels) -> None:
    for seed in range(60):
        check_corrupt_tables(seed)


@pytest.mark.parametrize("case", leaf_ops.BLOCKS, ids=str)
def test_leaf_groups_have_the_same_bits_in_every_scheduling_order(
    kernels: Kernels, case: Case
) -> None:
    batch = leaf_ops.draw(case, torch.float32)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(leaf_log_prob(batch))
    # Scores by row and by class: with and without a copy of them.
    by_class = replace(batch, leaf_score=batch.leaf_score.t().contiguous().t())
    results.append(leaf_log_prob(by_class))
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_bad_scores_of_leaves_stay_in_their_row(kernels: Kernels) -> None:
    batch = leaf_ops.draw(leaf_ops.BLOCKS[1], torch.float32)
    leaf_score = batch.leaf_score.clone()
    leaf_score[3] = torch.nan
    got, clean = leaf_log_prob(replace(batch, leaf_score=leaf_score)), leaf_log_prob(batch)
    others = torch.arange(len(got)) != 3
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all()


def test_corrupt_leaf_tables(kernels: Kernels) -> None:
    for seed in range(60):
        check_corrupt_leaf_tables(seed)
