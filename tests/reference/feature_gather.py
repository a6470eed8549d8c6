"""Reference of :mod:`hstree.ops.feature_gather`."""

from torch import Tensor


def feature_gather_reference(hidden: Tensor, feature_index: Tensor) -> Tensor:
    """Features [N, T, S] from hidden [N, D] and feature_index [T, S]."""
    return hidden[:, feature_index.long()]
