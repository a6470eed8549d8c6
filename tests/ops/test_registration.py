"""`import hstree` alone gives the operators with their gradients and fake kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, torch, hstree
assert "torch._dynamo" not in sys.modules
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
assert has_kernel("hstree::forward", "CompositeImplicitAutograd")
for name in ("path_log_prob", "wide_log_prob", "leaf_order", "feature_gather", "piecewise",
             "target_log_softmax", "sparse_adam_", "tree_topk", "tree_log_softmax",
             "leaf_tree_log_softmax"):
    for key in ("CPU", "Meta"):
        assert has_kernel(f"hstree::{name}", key), (name, key)
index = torch.tensor([[0, 1]], dtype=torch.int32)
input = torch.ones(2, 3, requires_grad=True)
torch.ops.hstree.feature_gather(input, index).sum().backward()
print(input.grad.tolist())
table = torch.ones(1, 2, requires_grad=True)
torch.ops.hstree.piecewise(torch.ones(3), table, 2.0).sum().backward()
logits = torch.ones(1, 2, requires_grad=True)
target = torch.tensor([0])
torch.ops.hstree.target_log_softmax(logits, target, 0.0, 1.0, None, 1.0)[0].backward()
print(table.grad.tolist(), logits.grad.tolist())
"""


def test_import_registers_everything(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    gradients = "[[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]\n[[3.0, 2.25]] [[0.5, -0.5]]\n"
    assert shown.stdout == gradients, shown.stderr
