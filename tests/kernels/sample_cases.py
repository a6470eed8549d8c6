"""Mixtures of trees for the kernels of sample and candidate_log_prob, and their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from ops.mixtures import MIXTURES, Mixture, corrupted, draw, huffman
from reference import candidate_log_prob_reference, sample_reference
from torch import Tensor

from hstree.trees import Tree
from kernels.emulation import call

SEED = torch.tensor([2**62 + 12345])


def wide_groups(leaves: bool) -> Mixture:
    """Groups of more leaves than a block holds scores, and of fewer."""
    groups = (tuple(range(1200)), tuple(range(1200, 1205)), 1205)
    first, second = Tree.from_nested(groups), Tree.from_nested((1205, *groups[:2]))
    return draw([first, second], rows=2, features=6, scale=1.0, leaves=leaves)


CASES: dict[str, Callable[[], Mixture]] = MIXTURES | {
    "features of several accesses": lambda: draw(huffman(30, 2, root=5, leaf=4), features=301),
    "aligned rows": lambda: draw(huffman(30, 2, root=5, leaf=4), features=528),
    "aligned rows of subsets": lambda: draw(
        huffman(60, 3, root=6, leaf=5), features=48, subset=16, leaves=True
    ),
    "no features, shared leaves": lambda: draw(huffman(16, 2, leaf=4), features=0, leaves=True),
    "wide groups": lambda: wide_groups(leaves=False),
    "wide groups, shared": lambda: wide_groups(leaves=True),
}


def sample(mixture: Mixture, n: int, temperature: float = 1.0, seed: Tensor = SEED) -> list[Tensor]:
    return list(call("sample", *mixture.arguments(), seed, n, temperature))


def candidates(mixture: Mixture, index: Tensor, temperature: float = 1.0) -> Tensor:
    log_prob: Tensor = call("candidate_log_prob", *mixture.arguments(), index, temperature)
    return log_prob


def check_sample(name: str, dtype: torch.dtype, temperature: float, n: int = 2) -> None:
    """The draws of the reference in float64, but for the roundings of the dtype, and their
    log-probabilities."""
    exact = CASES[name]()
    index, log_prob = sample(exact.to(dtype), n, temperature)
    expected, _ = sample_reference(*exact.arguments(), seed=SEED, n=n, temperature=temperature)
    assert index.shape == log_prob.shape == expected.shape
    assert index.dtype == torch.int64
    assert log_prob.dtype == torch.promote_types(dtype, torch.float32)
    others = int((index != expected).sum())
    assert others <= (0 if dtype == torch.float64 else 0.1 * index.numel())
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for classes, got in (
        (index, log_prob),
        (index * 0, candidates(exact.to(dtype), index * 0, temperature)),
    ):
        wanted = candidate_log_prob_reference(
            *exact.arguments(), candidates=classes, temperature=temperature
        )
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def check_corrupt_tables(seed: int) -> None:
    """Random numbers in the tables give classes in range, and no stray access."""
    mixture = corrupted(seed, np.random.default_rng(seed))
    if mixture is None:
        return
    mixture = replace(mixture.to(torch.float32), trees=())
    classes = mixture.leaf_edge.shape[1]
    index, _ = sample(mixture, 2)
    assert ((index >= 0) & (index < classes)).all()
    outside = torch.tensor([-1, -2, classes, 2**62]).expand(len(index), 4)
    got = candidates(mixture, outside)
    assert (got[:, 0] == 0).all()
    assert got[:, 1:].isnan().all()
