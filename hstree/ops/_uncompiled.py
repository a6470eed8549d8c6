"""Functions that torch.compile leaves out of its graphs."""

from __future__ import annotations

import torch

from hstree.ops import _tree_op

apply_sparse = torch.compiler.disable(  # type: ignore[no-untyped-call]
    _tree_op.apply_sparse, reason="torch.compile has no sparse gradients; pass sparse=False"
)
