"""A weight that is read as a whole and by rows has one gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from heads.support import allocations
from torch import Tensor
from torch.func import grad

from hstree import TreeEnsemble
from hstree.ops._row_sparse import with_rows
from hstree.optim import AdamW, clip_grad_norm_

# In torch's own code, the first time that forward mode is at work.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

INDEX = torch.tensor([3, 0, 3, 4])
INCREASING = torch.tensor([0, 3, 4, 5])


def loss(whole: Tensor, rows: Tensor, read: str) -> Tensor:
    parts = []
    if "whole" in read:
        parts.append((whole @ torch.linspace(-1, 1, whole.shape[1]).to(whole)).square().sum())
    if "sum" in read:  # its gradient is expanded: one number
        parts.append(whole.sum())
    if "rows" in read:
        parts.append((rows * torch.arange(rows.numel()).view(rows.shape)).sin().sum())
    return sum(parts[1:], parts[0])


@pytest.mark.parametrize("read", ["whole", "rows", "whole rows", "sum rows", "whole sum rows"])
@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("increasing", [True, False])
def test_gradient(read: str, sparse: bool, increasing: bool) -> None:
    found, index = [], INCREASING if increasing else INDEX
    for own in (True, False):
        weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        weight.requires_grad_()
        if own:
            both = with_rows(weight, index, sparse=sparse)
        else:
            both = weight, F.embedding(index, weight)
        loss(*both, read).backward()
        assert weight.grad is not None
        assert weight.grad.is_sparse == (own and sparse and read == "rows")
        found.append(weight.grad.to_dense())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_sparse_gradients_of_classes_increase(dtype: torch.dtype) -> None:
    """Also with the rows of the root merged, where torch adds sparse tensors: not in float16."""
    counts = [1 + 10**6 // (y + 1) for y in range(3000)]
    head = TreeEnsemble.from_counts(4, counts, sparse=True).to(dtype)
    assert len(head.below.single_class)
    head(torch.randn(2, 4), torch.tensor([0, 2999])).loss.backward()
    for parameter in (head.output_embedding, head.below.bias):
        assert parameter is not None
        assert parameter.grad is not None
        index = parameter.grad._indices()
        row = index[0] if len(index) == 1 else index[0] * 3000 + index[1]
        merged = dtype != torch.float16 or len(index) == 2
        assert bool((row.diff() > 0).all()) == merged


def test_the_gradient_of_another_is_left_alone() -> None:
    """Only a new tensor is written into: here one number for all elements, and create_graph."""
    weight = torch.randn(6, 3, requires_grad=True)
    whole, rows = with_rows(weight, INDEX)
    upstream = torch.ones(()).expand(6, 3)
    torch.autograd.backward([whole, rows], [upstream, torch.ones(4, 3)])
    assert torch.equal(upstream, torch.ones(6, 3))
    whole, rows = with_rows(weight.double(), INDEX)
    (first,) = torch.autograd.grad(loss(whole, rows, "whole rows"), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    plain = weight.double()
    (of_plain,) = torch.autograd.grad(
        loss(plain, plain[INDEX], "whole rows"), weight, create_graph=True
    )
    torch.testing.assert_close(second, torch.autograd.grad(of_plain.square().sum(), weight)[0])


def test_transforms() -> None:
    weight = torch.randn(6, 3)

    def own(weight: Tensor) -> Tensor:
        return loss(*with_rows(weight, INDEX, sparse=True), "whole rows")

    def plain(weight: Tensor) -> Tensor:
        return loss(weight, weight[INDEX], "whole rows")

    torch.testing.assert_close(grad(own)(weight), grad(plain)(weight))


@pytest.mark.parametrize("step", ["plain", "clipped", "accumulated"])
def test_no_second_gradient_of_the_embedding(step: str) -> None:
    """Trees whose roots have classes among their children: torch allocates no tensor of the size of
    E [V, D]; the gradient itself lies in recycled memory."""
    V, D = 20_000, 16
    head = TreeEnsemble.from_counts(D, [1 + 10**6 // (y + 1) for y in range(V)])
    assert len(head.below.single_class)
    hidden, target = torch.randn(16, D), torch.randint(V, (16,))
    optimizer = AdamW(head.parameters())

    def run() -> None:
        for _ in range(2 if step == "accumulated" else 1):
            head(hidden, target).loss.backward()
        if step == "clipped":
            clip_grad_norm_(head.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    run()
    largest, most = allocations(run)
    assert largest < 2 * V * D  # half of E
    assert most < 4 * V * D
