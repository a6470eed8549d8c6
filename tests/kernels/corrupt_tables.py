"""Random numbers in the tables of the kernels that walk trees from the root: a result, and no stray
access."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from ops import mixtures, test_leaf_tree_log_softmax
from ops.test_tree_log_softmax import corrupted

from hstree.ops import candidate_log_prob, sample

SEED = torch.tensor([2**62 + 12345])


def check_tree_log_softmax(seed: int) -> None:
    batch = corrupted(seed, "flat")
    log_prob = torch.ops.hstree.tree_log_softmax(*batch.arguments())
    assert log_prob.shape == batch.grad.shape
    batch = corrupted(seed, "levels", draw=test_leaf_tree_log_softmax.draw)
    log_prob = torch.ops.hstree.leaf_tree_log_softmax(*batch.arguments())
    assert log_prob.shape == batch.grad.shape


def check_sample(seed: int) -> None:
    """Classes in range."""
    mixture = mixtures.corrupted(seed, np.random.default_rng(seed))
    if mixture is None:
        return
    arguments = replace(mixture.to(torch.float32), trees=()).arguments()
    classes = mixture.leaf_edge.shape[1]
    index, _ = sample(*arguments, seed=SEED, n=2)
    assert ((index >= 0) & (index < classes)).all()
    outside = torch.tensor([-1, -2, classes, 2**62]).expand(len(index), 4)
    got = candidate_log_prob(*arguments, candidates=outside)
    assert (got[:, 0] == 0).all()
    assert got[:, 1:].isnan().all()
