"""The kernels of forest_gradient_ under emulation; see also tests/ops/test_forest_log_prob.py."""

from __future__ import annotations

import pytest
from cuda_emu.library import EmulatedLibrary
from ops.test_forest_log_prob import arguments, chunk_gradients

from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests


# Rows of two tiles; one warp for each cluster, and several.
@pytest.mark.parametrize(("classes", "trees", "clusters"), [(70, 3, 20), (70, 1, 70), (300, 2, 3)])
def test_same_bits_in_every_scheduling_order(
    library: EmulatedLibrary, classes: int, trees: int, clusters: int
) -> None:
    given = arguments(70, classes, trees, clusters)
    check_every_order(library, lambda: chunk_gradients(given))
