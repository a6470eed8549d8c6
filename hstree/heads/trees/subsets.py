"""The subsets of the features that the trees read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hstree._checks import check_int


def draw_subsets(
    n_trees: int, in_features: int, subset_size: int, subset_block: int, seed: int
) -> Tensor | None:
    """Features of each tree, int32 [T, S], increasing; None if S = D.

    Raises:
        ValueError: for sizes out of range.
    """
    check_int("subset_size", subset_size, 1, in_features)
    check_int("subset_block", subset_block)
    if in_features % subset_block or subset_size % subset_block:
        raise ValueError(
            f"subset_block: expected a divisor of in_features ({in_features}) and of "
            f"subset_size ({subset_size}), got {subset_block}"
        )
    if subset_size == in_features:
        return None
    random = np.random.default_rng(seed)
    blocks, taken = in_features // subset_block, subset_size // subset_block
    drawn = np.stack([np.sort(random.permutation(blocks)[:taken]) for _ in range(n_trees)])
    features = drawn[:, :, None] * subset_block + np.arange(subset_block)
    return torch.tensor(features.reshape(n_trees, subset_size), dtype=torch.int32, device="cpu")
