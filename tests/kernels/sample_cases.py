"""The kernels of sample and candidate_log_prob, and corrupt tables for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from ops.mixtures import Mixture, corrupted
from torch import Tensor

from kernels.emulation import call

SEED = torch.tensor([2**62 + 12345])


def sample(mixture: Mixture, n: int, temperature: float = 1.0, seed: Tensor = SEED) -> list[Tensor]:
    return list(call("sample", *mixture.arguments(), seed, n, temperature))


def candidates(mixture: Mixture, index: Tensor, temperature: float = 1.0) -> Tensor:
    log_prob: Tensor = call("candidate_log_prob", *mixture.arguments(), index, temperature)
    return log_prob


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
