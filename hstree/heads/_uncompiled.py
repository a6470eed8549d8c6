"""Functions that torch.compile leaves out of its graphs."""

from __future__ import annotations

import torch

from hstree.heads import sampled

gather_rows = torch.compiler.disable(  # type: ignore[no-untyped-call]
    sampled.gather_rows, reason="torch.compile has no sparse gradients; pass sparse=False"
)
