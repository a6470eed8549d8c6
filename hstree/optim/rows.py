"""Row-sparse gradients without repeated rows."""

from __future__ import annotations

import torch
from torch import Tensor


def summed_rows(gradient: Tensor) -> Tensor:
    """The sparse gradient with strictly increasing rows. Gradients of
    :class:`hstree.heads.TreeEnsemble` have them; those of an embedding are coalesced."""
    if gradient.is_coalesced():
        return gradient
    index = gradient._indices()
    row = index[0]
    # Several sparse dimensions, such as tree and row, as one number.
    for size, inner in zip(gradient.shape[1:], index[1:], strict=False):
        row = torch.add(inner, row, alpha=size)
    return gradient if bool((row[1:] > row[:-1]).all()) else gradient.coalesce()
