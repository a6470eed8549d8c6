"""The kernels of forest_gradient_ under emulation; see also tests/ops/test_forest_log_prob.py."""

from __future__ import annotations

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.test_forest_log_prob import arguments, chunk_gradients

from hstree.ops.forest_log_prob import by_cluster
from kernels.emulation import check_every_order, emulated_tests
from kernels.logit_cases import BAD_TARGETS

pytestmark = emulated_tests


# Rows of two tiles; one warp for each cluster, and several.
@pytest.mark.parametrize(("classes", "trees", "clusters"), [(70, 3, 20), (70, 1, 70), (300, 2, 3)])
def test_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, classes: int, trees: int, clusters: int
) -> None:
    given = arguments(70, classes, trees, clusters)
    check_every_order(library, lambda: chunk_gradients(given))


def check_bad_numbers() -> None:
    """Targets out of range: NaN in their rows. A cluster out of range is none: its class has the
    gradient NaN, and all else is as if the class had probability 0."""
    given = arguments(12)
    clean = chunk_gradients(given)
    given["target"][:6] = torch.tensor(BAD_TARGETS)
    given["target"][2], bad = 41, torch.arange(12) < 6
    for got, expected in zip(chunk_gradients(given), clean, strict=True):
        assert got[..., bad].isnan().all()
        assert torch.equal(got[..., ~bad], expected[..., ~bad])
    given = arguments(12)
    given["target"][given["target"] == 7] = 8
    for cluster in (-1, 5, -(2**31), 2**31 - 1):
        given["cluster"][7, 1] = cluster
        log_prob, grad_log_prior, of_scores, of_clusters = chunk_gradients(given)
        kept = given["target"] != -1
        assert torch.equal(of_scores.isnan().any(1), torch.arange(41) == 7)
        assert torch.equal(of_scores[7].isnan(), kept)
        for finite in (log_prob, grad_log_prior, of_clusters):
            assert finite.isfinite().all()
    given["target"][:2] = 7
    assert torch.equal(chunk_gradients(given)[0].isnan(), torch.arange(12) < 2)


def test_bad_numbers() -> None:
    check_bad_numbers()


def test_forward_overwrites_nothing() -> None:
    given = arguments(12)
    scores, of_clusters = torch.randn(41, 12), torch.randn(3, 5, 12)
    before = scores.clone(), of_clusters.clone()
    rest = torch.zeros(3, 12), given["cluster"], given["target"], *by_cluster(given["cluster"], 5)
    forward = torch.ops.hstree.forest_gradient_(scores, of_clusters, *rest, None)
    assert torch.equal(scores, before[0])
    assert torch.equal(of_clusters, before[1])
    with_gradient = torch.ops.hstree.forest_gradient_(scores, of_clusters, *rest, torch.ones(12))
    assert torch.equal(forward[0], with_gradient[0])
    assert forward[1].shape == (0, 12)
