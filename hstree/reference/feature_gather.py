"""Reference of :mod:`hstree.ops.feature_gather`."""

from torch import Tensor


def feature_gather_reference(input: Tensor, feature_index: Tensor) -> Tensor:
    """[N, T, S] from input [N, D] and feature_index [T, S]."""
    return input[:, feature_index.long()]
