"""The kernels of sample under emulation; see also tests/ops/test_sample.py."""

from __future__ import annotations

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from ops.mixtures import BLOCKS, MIXTURES, Mixture, draw, huffman
from torch import Tensor

from hstree.ops import sample
from kernels.corrupt_tables import SEED, check_sample
from kernels.emulation import check_every_order, emulated_tests

pytestmark = emulated_tests


def drawn(mixture: Mixture, n: int) -> tuple[Tensor, Tensor]:
    return sample(*mixture.arguments(), seed=SEED, n=n)


@pytest.mark.parametrize("name", [*MIXTURES, *BLOCKS])
def test_same_bits_in_every_scheduling_order(library: EmulatedLibrary, name: str) -> None:
    mixture = (MIXTURES | BLOCKS)[name]().to(torch.bfloat16)

    check_every_order(library, lambda: drawn(mixture, 3))


@pytest.mark.parametrize("name", ["groups", "one binary tree", "wide groups"])
def test_nan_stays_in_its_row(name: str) -> None:
    mixture = (MIXTURES | BLOCKS)[name]()
    clean = drawn(mixture, 3)
    mixture.hidden[1] = torch.nan
    index, log_prob = drawn(mixture, 3)
    assert log_prob[1].isnan().all()
    assert ((index[1] >= 0) & (index[1] < mixture.leaf_edge.shape[1])).all()
    for got, expected in zip((index, log_prob), clean, strict=True):
        others = torch.arange(len(got)) != 1
        assert torch.equal(got[others], expected[others])


def test_children_of_probability_0_are_never_drawn() -> None:
    """-inf in the root of one tree, in the gate, and from biases of binary nodes."""
    mixture = draw(huffman(12, 2, root=4), rows=40)
    assert mixture.root_log_prob is not None
    assert mixture.bias is not None
    mixture.root_log_prob[0, :, [0, 3]] = -torch.inf
    mixture.bias[0] = torch.where(mixture.bias[0] > 0, torch.inf, -torch.inf)
    mixture.log_gate[::2, 1] = -torch.inf
    mixture.log_gate[::2, 0] = 0
    _, log_prob = drawn(mixture, 5)
    assert log_prob.isfinite().all()


def test_corrupt_tables() -> None:
    for seed in range(40):
        check_sample(seed)
