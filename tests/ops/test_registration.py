"""`import hstree` alone gives the operators with their gradients and fake kernels."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hstree.ops import sample, tree_topk
from ops.apart import every_instruction_set, with_instruction_set

SCRIPT = """
import sys, torch, hstree
assert "torch._dynamo" not in sys.modules
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
assert has_kernel("hstree::forward", "CompositeImplicitAutograd")
for name in ("path_log_prob", "group_log_prob", "feature_gather", "piecewise",
             "target_log_softmax", "sparse_adam_", "tree_topk", "tree_log_softmax", "group_topk",
             "sample", "forest_gradient_", "forest_log_softmax", "screened_topk"):
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


def capability() -> str:
    return str(torch.ops.hstree.cpu_capability())


@every_instruction_set
def test_the_instruction_set_has_a_name(capability: str, tmp_path: Path) -> None:
    """That of HSTREE_CPU_CAPABILITY."""
    found = with_instruction_set(capability, "ops.test_registration", "capability()", tmp_path)
    assert found == capability


def names_of(op: str) -> list[str]:
    schema = getattr(torch.ops.hstree, op).default._schema
    return [argument.name for argument in schema.arguments]


def test_the_ops_that_walk_trees_share_their_arguments() -> None:
    """The fake kernels of both find the gate and the number of results at these places."""
    topk, sample = names_of("tree_topk"), names_of("sample")
    assert topk[:11] == sample[:11]
    assert topk[6] == "log_gate"
    assert topk[11:] == ["k", "most_scored"]
    assert sample[11:] == ["seed", "n", "temperature"]


@pytest.mark.parametrize("function", [tree_topk, sample], ids=["tree_topk", "sample"])
def test_functions_have_the_names_of_the_schema(function: Callable[..., object]) -> None:
    assert [*inspect.signature(function).parameters] == names_of(function.__name__)


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
