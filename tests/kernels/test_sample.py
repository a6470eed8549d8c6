"""The kernels of sample and candidate_log_prob under emulation; see also
tests/ops/test_sample.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_emu.library import ORDERS
from ops.mixtures import BLOCKS, MIXTURES, draw, huffman
from reference.candidate_log_prob import all_log_probs

from kernels.emulation import Kernels
from kernels.sample_cases import (
    candidates,
    check_corrupt_tables,
    sample,
)

pytestmark = pytest.mark.slow  # the kernels are compiled first, for a minute


def test_draws_follow_the_distribution(kernels: Kernels) -> None:
    """Pearson's chi-square of 1,500 draws, below its mean plus 5 standard deviations."""
    mixture = draw(huffman(20, 2, root=4), rows=1, features=5, scale=0.3, bias=False)
    n = 1500
    index, log_prob = sample(mixture, n)
    prob = all_log_probs(*mixture.arguments()).exp()[0]
    torch.testing.assert_close(log_prob.exp(), prob[index])
    count = torch.bincount(index[0], minlength=20)
    expected = n * prob
    assert expected.min() > 2
    chi_square = float(((count - expected) ** 2 / expected).sum())
    assert chi_square < 19 + 5 * (2 * 19) ** 0.5
    assert not torch.equal(sample(mixture, n, seed=torch.tensor([1]))[0], index)


def test_same_bits_in_every_scheduling_order(kernels: Kernels) -> None:
    mixture = BLOCKS["wide groups, shared"]().to(torch.bfloat16)
    results = []
    for order in ORDERS:
        kernels.set_order(*order)
        results.append(sample(mixture, 3))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize("name", ["shared leaves", "one binary tree", "wide groups"])
def test_nan_stays_in_its_row(kernels: Kernels, name: str) -> None:
    mixture = (MIXTURES | BLOCKS)[name]()
    clean = sample(mixture, 3)
    mixture.hidden[1] = torch.nan
    index, log_prob = sample(mixture, 3)
    assert log_prob[1].isnan().all()
    assert ((index[1] >= 0) & (index[1] < mixture.leaf_edge.shape[1])).all()
    for got, expected in zip((index, log_prob), clean, strict=True):
        others = torch.arange(len(got)) != 1
        assert torch.equal(got[others], expected[others])


def test_children_of_probability_0_are_never_drawn(kernels: Kernels) -> None:
    """-inf in the root of one tree, in the gate, and from biases of binary nodes."""
    mixture = draw(huffman(12, 2, root=4), rows=40)
    assert mixture.root_log_prob is not None
    assert mixture.bias is not None
    mixture.root_log_prob[0, :, [0, 3]] = -torch.inf
    mixture.bias[0] = torch.where(mixture.bias[0] > 0, torch.inf, -torch.inf)
    mixture.log_gate[::2, 1] = -torch.inf
    mixture.log_gate[::2, 0] = 0
    _, log_prob = sample(mixture, 5)
    assert log_prob.isfinite().all()


def test_candidates_out_of_range(kernels: Kernels) -> None:
    mixture = draw(huffman(12, 2, root=4), rows=3)
    got = candidates(mixture, torch.tensor([[-1, 0, 12, -2]]).expand(3, 4))
    assert got[:, 0].tolist() == [0.0] * 3
    torch.testing.assert_close(got[:, 1], all_log_probs(*mixture.arguments())[:, 0])
    assert got[:, 2:].isnan().all()
    assert candidates(mixture, torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 0)


def test_corrupt_tables(kernels: Kernels) -> None:
    for seed in range(40):
        check_corrupt_tables(seed)


def test_bad_argument(kernels: Kernels) -> None:
    mixture = draw(huffman(12))
    for n, temperature, message in (
        (0, 1.0, "n: expected at least 1 draw of a row, got 0"),
        (1, 0.0, "temperature: expected a finite positive number, got 0"),
        (1, np.nan, "temperature: expected a finite positive number, got nan"),
    ):
        with pytest.raises(RuntimeError, match=f"^hstree::sample: {message}"):
            sample(mixture, n, temperature)
