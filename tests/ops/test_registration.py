"""`import hstree` alone gives the operators with their gradients and fake kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hstree.ops._tree_mixture import TreeMixture, split_arguments

SCRIPT = """
import sys, torch, hstree
assert "torch._dynamo" not in sys.modules
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
assert has_kernel("hstree::forward", "CompositeImplicitAutograd")
for name in ("path_log_prob", "wide_log_prob", "leaf_order", "feature_gather", "piecewise",
             "target_log_softmax", "sparse_adam_", "tree_topk", "tree_log_softmax",
             "leaf_tree_log_softmax", "leaf_tree_topk", "forest_gradient_", "screened_topk"):
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


@pytest.mark.parametrize("name", ["tree_topk", "sample", "candidate_log_prob"])
def test_a_tree_mixture_has_the_names_of_the_schema(name: str) -> None:
    op = getattr(torch.ops.hstree, name).default
    names = [argument.name for argument in op._schema.arguments]
    mixture, rest = split_arguments(names)
    assert mixture._asdict() == {field: field for field in TreeMixture._fields}
    assert set(rest) <= {"k", "most_scored", "seed", "n", "candidates", "temperature"}
    assert [*mixture, *rest] == names


def test_the_backward_ops_have_one_signature() -> None:
    of_ops = {
        name: [
            argument.name
            for argument in getattr(
                torch.ops.hstree, f"{name}_log_prob_backward"
            ).default._schema.arguments
        ]
        for name in ("path", "wide", "leaf")
    }
    for names in of_ops.values():
        assert names[:4] == ["grad_log_prob", "hidden", "weight", "target"]
        assert names[8:] == ["score", "order", "plan", "output_mask", "sparse"]


def test_torch_func_has_no_rule_for_registered_gradients() -> None:
    """When this fails, torch may have mended it, and the Functions of hstree.ops, which torch.func
    calls instead of the ops, can go."""
    name = "hstree_test::cube"
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, "default", lambda x: x**3)
    torch.library.register_autograd(
        name,
        lambda ctx, upstream: 3 * upstream * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    cube, x = torch.ops.hstree_test.cube, torch.tensor([1.0, 2.0])
    leaf = x.clone().requires_grad_()
    cube(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 12.0]
    with pytest.raises(RuntimeError, match="must override the setup_context"):
        torch.func.grad(lambda x: cube(x).sum())(x)
