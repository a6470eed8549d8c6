"""`import hstree` alone gives the operators with their gradients and fake kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch, hstree
for name in ("forward", "wide_log_prob", "feature_gather"):
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"hstree::{name}", key), (name, key)
index = torch.tensor([[0, 1]], dtype=torch.int32)
input = torch.ones(2, 3, requires_grad=True)
torch.ops.hstree.feature_gather(input, index).sum().backward()
print(input.grad.tolist())
"""


def test_import_registers_everything(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert shown.stdout == "[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]\n", shown.stderr
