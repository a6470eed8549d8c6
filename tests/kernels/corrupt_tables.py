"""Random numbers in the tables of the kernels that walk trees from the root: a result, and no stray
access."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from ops import mixtures
from ops.tree_softmax_cases import corrupted

from hstree.ops import sample

ops = torch.ops.hstree
SEED = torch.tensor([2**62 + 12345])


def check_tree_log_softmax(seed: int) -> None:
    for groups in (False, True):
        batch = corrupted(seed, groups)
        assert ops.tree_log_softmax(*batch.arguments()).shape == batch.grad.shape


def check_sample(seed: int) -> None:
    """Classes in range."""
    mixture = mixtures.corrupted(seed, np.random.default_rng(seed))
    if mixture is None:
        return
    arguments = replace(mixture.to(torch.float32), trees=()).arguments()
    classes = mixture.leaf_edge.shape[1]
    index, _ = sample(*arguments, seed=SEED, n=2)
    assert ((index >= 0) & (index < classes)).all()
