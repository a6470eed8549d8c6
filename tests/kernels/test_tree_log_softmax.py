"""The kernels of tree_log_softmax under emulation; see also tests/ops/test_tree_log_softmax.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_tree_log_softmax import BLOCKS, GROUP_BLOCKS
from ops.tree_softmax_cases import Case, draw, mixed

from kernels.corrupt_tables import check_tree_log_softmax
from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests
log_prob = torch.ops.hstree.tree_log_softmax


def test_threads_of_several_nodes() -> None:
    """Enough nodes and rows for chunks of four nodes."""
    case = Case("large", ("random", "random"), classes=4200, rows=130)
    batch = draw(case, torch.float32)
    torch.testing.assert_close(log_prob(*batch.arguments()), mixed(batch), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, case: Case) -> None:
    batch = draw(case, torch.float32)
    check_every_order(library, lambda: [log_prob(*batch.arguments())])


@pytest.mark.parametrize("case", GROUP_BLOCKS, ids=str)
def test_groups_have_the_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, case: Case
) -> None:
    """And for scores by row and by class: with and without a copy of them."""
    batch = draw(case, torch.float32, groups=True)
    by_class = replace(batch, class_score=batch.class_score.t().contiguous().t())
    check_every_order(library, lambda: [log_prob(*batch.arguments())])
    results = [log_prob(*some.arguments()) for some in (batch, by_class)]
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_bad_scores_stay_in_their_row(value: float) -> None:
    batch = draw(BLOCKS[2], torch.float32)
    score = batch.score.clone()
    score[0, :, 3] = value
    got, clean = (log_prob(*some.arguments()) for some in (replace(batch, score=score), batch))
    others = torch.arange(len(got)) != 3
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all()


def test_bad_scores_of_classes_stay_in_their_row() -> None:
    batch = draw(GROUP_BLOCKS[1], torch.float32, groups=True)
    class_score = batch.class_score.clone()
    class_score[3] = torch.nan
    bad = replace(batch, class_score=class_score)
    got, clean = (log_prob(*some.arguments()) for some in (bad, batch))
    others = torch.arange(len(got)) != 3
    assert torch.equal(got[others], clean[others])
    assert got[3].isnan().all()


def test_classes_without_a_path_are_nan() -> None:
    batch = draw(BLOCKS[3], torch.float64)
    edge = batch.edge.clone()
    lost = int((edge[1, :, 1] == ~7).nonzero())
    edge[1, lost, 1] = ~60  # one more than there are
    got, clean = (log_prob(*some.arguments()) for some in (replace(batch, edge=edge), batch))
    others = torch.arange(60) != 7
    assert torch.equal(got[:, others], clean[:, others])
    assert got[:, 7].isnan().all()


def test_corrupt_tables() -> None:
    for seed in range(60):
        check_tree_log_softmax(seed)
