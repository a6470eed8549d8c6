"""Rows in the order of their leaves: torch.ops.hstree.leaf_order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cuda_emu.library import EmulatedLibrary
from reference.leaf_order import leaf_order_reference
from torch.torch_version import TorchVersion

from hstree.heads import TreeEnsemble
from hstree.ops import leaf_order
from hstree.trees import build_ensemble
from ops.cases import PATH, WIDE, Case, TreeOpUnderTest

CASE = Case("ragged paths", rows=70, subset=7)


@pytest.mark.parametrize("rows", [0, 1, 70, 300])
def test_equals_a_stable_sort(rows: int, device: torch.device) -> None:
    batch = PATH.batch(replace(CASE, rows=rows)).to(device)
    order = leaf_order(batch.target, batch.leaf_position)
    assert order.shape == (3, rows)
    assert torch.equal(order, leaf_order_reference(batch.target, batch.leaf_position))


@pytest.mark.parametrize("op", [PATH, WIDE], ids=["path", "wide"])
@pytest.mark.parametrize("sparse", [False, True])
def test_shared_by_ops_on_the_same_trees(
    op: TreeOpUnderTest, sparse: bool, device: torch.device
) -> None:
    batch = op.batch(CASE, torch.float32).to(device)
    expected = op.gradients(batch, sparse)
    order = leaf_order(batch.target, batch.leaf_position)
    leaves = [x.requires_grad_() for x in (batch.hidden, batch.weight, batch.bias)]
    *arguments, longest = batch.arguments()
    log_prob = op.function(*arguments, **{op.longest_name: longest}, sparse=sparse, order=order)
    log_prob.backward(batch.grad)
    for got, want in zip([log_prob, *(x.grad for x in leaves)], expected, strict=True):
        assert torch.equal(got.to_dense(), want.to_dense())


@pytest.mark.parametrize("op", [PATH, WIDE], ids=["path", "wide"])
def test_backward_works_out_what_it_is_not_given(op: TreeOpUnderTest, device: torch.device) -> None:
    batch = op.batch(CASE, torch.float32).to(device)
    _, score, *kept = op.operator(*batch.arguments())
    if kept[1].numel() == 0:
        kept[1] = None
    for sparse in (False, True):
        given = op.backward(batch, score, *kept, sparse=sparse)
        for got, want in zip(op.backward(batch, score, sparse=sparse), given, strict=True):
            assert torch.equal(got, want)


def test_opcheck(device: torch.device) -> None:
    batch = PATH.batch(CASE).to(device)
    torch.library.opcheck(torch.ops.hstree.leaf_order.default, (batch.target, batch.leaf_position))
    order = leaf_order(batch.target, batch.leaf_position)
    torch.library.opcheck(PATH.operator, (*batch.arguments(), order))


def test_errors(device: torch.device) -> None:
    batch = PATH.batch(CASE).to(device)
    target, leaf_position = batch.target, batch.leaf_position
    with pytest.raises(
        RuntimeError, match=r"leaf_order: target: expected shape \[N\], got \[70, 1\]"
    ):
        leaf_order(target[:, None], leaf_position)
    with pytest.raises(RuntimeError, match="leaf_order: target: expected dtype Long, got Int"):
        leaf_order(target.int(), leaf_position)
    with pytest.raises(RuntimeError, match=r"leaf_position: expected shape \[T, V\], got \[23\]"):
        leaf_order(target, leaf_position[0])
    order = leaf_order(target, leaf_position)
    for bad, match in (
        (order[0], r"order: expected shape \[T, N\], got \[70\]"),
        (order[1:], r"order: expected size 3 \(trees of leaf_position\)"),
        (order[:, 1:], r"order: expected size 70 \(rows of hidden\)"),
        (order.int(), "order: expected dtype Long, got Int"),
    ):
        with pytest.raises(RuntimeError, match=match):
            PATH.operator(*batch.arguments(), bad)


def test_error_of_the_allocator() -> None:
    """The text of torch, which its stable ABI passes on from 2.13 on; 2**53 bytes fit nowhere."""
    with pytest.raises(RuntimeError) as caught:
        leaf_order(torch.full((2**20,), -1), torch.empty((2**30, 0), dtype=torch.int32))
    expected = (
        "hstree: not enough memory for a tensor of shape [1073741824, 1048576] and dtype Long;"
    )
    assert str(caught.value).startswith(expected)
    has_text = TorchVersion(torch.__version__) >= "2.13"
    assert ("can't allocate memory" in str(caught.value)) == has_text


def test_values_out_of_range() -> None:
    batch = PATH.batch(CASE)
    batch.target[3] = 23
    match = r"target\[3\]: expected less than 23 \(the number of classes\), got 23"
    with pytest.raises(RuntimeError, match=match):
        leaf_order(batch.target, batch.leaf_position)
    batch.target[3] = 0
    order = leaf_order(batch.target, batch.leaf_position)
    for value in (-1, 70):
        order[1, 5] = value
        with pytest.raises(RuntimeError, match=rf"order: expected rows in \[0, 70\), got {value}"):
            PATH.operator(*batch.arguments(), order)


@pytest.mark.slow  # the kernels are compiled first
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_of_a_head_sorts_once(emulated: EmulatedLibrary, sparse: bool) -> None:
    """Forward and backward of the CUDA operators, for wide and binary nodes of the same trees."""
    trees = build_ensemble("random", 40, 3, root=4, leaf=3)
    head = TreeEnsemble(6, 40, trees, sparse=sparse)
    assert head.nodes.binary_weight is not None
    assert head.nodes.wide_weight is not None
    hidden = torch.randn(20, 6, requires_grad=True)
    with emulated.on_cpu_tensors(), torch.profiler.profile() as profile:
        head(hidden, torch.arange(20)).loss.backward()
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::sort"] == 1
    assert calls.get("aten::cumsum", 0) == (2 if sparse else 0)
