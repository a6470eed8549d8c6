"""torch.ops.hstree.feature_gather and feature_gather_backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.feature_gather import feature_gather_reference
from torch import Tensor

from hstree.ops import feature_gather
from ops.cases import DTYPES, threads


def batch(
    rows: int, trees: int, features: int, subset: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, feature_index and a gradient of the output."""
    random = np.random.default_rng(0)
    drawn = [np.sort(random.choice(features, subset, replace=False)) for _ in range(trees)]
    index = torch.tensor(np.array(drawn).reshape(trees, subset), dtype=torch.int32)
    hidden = torch.from_numpy(random.standard_normal((rows, features))).to(dtype)
    grad = torch.from_numpy(random.standard_normal((rows, trees, subset))).to(dtype)
    return hidden, index, grad


SHAPES = [
    (29, 3, 19, 7),
    (70, 1, 219, 170),
    (5, 8, 16, 16),
    (5, 2, 3, 1),
    (0, 2, 5, 3),
    (4, 0, 5, 0),
    (4, 2, 5, 0),
    (4, 2, 0, 0),
    (1030, 2, 5, 3),  # more rows than rows of blocks
    (3, 2, 300, 300),  # several blocks of columns, every feature
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_reference(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    hidden, index, grad = (x.to(device) for x in batch(*shape, dtype))
    hidden.requires_grad_()
    output = feature_gather(hidden, index)
    output.backward(grad)
    expected = feature_gather_reference(hidden.detach(), index)
    assert output.dtype == dtype
    assert torch.equal(output, expected)
    true = hidden.detach().double().zero_()
    for t in range(shape[1]):
        true.index_add_(1, index[t].long(), grad[:, t].double())
    # Summed in float32 or wider and rounded once.
    eps = torch.finfo(dtype).eps
    assert hidden.grad.dtype == dtype
    torch.testing.assert_close(hidden.grad.double(), true, rtol=eps / 2 + 4e-7, atol=4e-7)


def test_literal_values(device: torch.device) -> None:
    hidden = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], device=device, requires_grad=True)
    index = torch.tensor([[0, 2], [1, 2]], dtype=torch.int32, device=device)
    output = feature_gather(hidden, index)
    assert output.tolist() == [[[1.0, 3.0], [2.0, 3.0]], [[4.0, 6.0], [5.0, 6.0]]]
    output.backward(torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]).to(device))
    assert hidden.grad.tolist() == [[1.0, 3.0, 6.0], [5.0, 7.0, 14.0]]


def test_noncontiguous(device: torch.device) -> None:
    hidden, index, grad = (x.to(device) for x in batch(9, 3, 19, 7, torch.float32))
    expected = feature_gather(hidden, index)
    backward = torch.ops.hstree.feature_gather_backward
    strided = index.t().contiguous().t()
    assert torch.equal(feature_gather(hidden.t().contiguous().t(), strided), expected)
    other = grad.transpose(0, 2).contiguous().transpose(0, 2)
    assert torch.equal(backward(other, strided, 19), backward(grad, index, 19))
    one = torch.ones((), device=device).expand_as(grad)
    assert torch.equal(backward(one, index, 19), backward(torch.ones_like(grad), index, 19))


def test_same_bits_for_every_number_of_threads() -> None:
    hidden, index, grad = batch(200, 4, 60, 45, torch.float32)
    results = []
    for count in (1, 2, 1):
        with threads(count):
            backward = torch.ops.hstree.feature_gather_backward(grad, index, 60)
            results.append((feature_gather(hidden, index), backward))
    for output, gradient in results[1:]:
        assert torch.equal(output, results[0][0])
        assert torch.equal(gradient, results[0][1])


def test_gradcheck(device: torch.device) -> None:
    hidden, index, _ = (x.to(device) for x in batch(4, 3, 6, 4))
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: feature_gather(x, index), hidden)


def test_opcheck(device: torch.device) -> None:
    hidden, index, grad = (x.to(device) for x in batch(4, 3, 6, 4, torch.float32))
    torch.library.opcheck(torch.ops.hstree.feature_gather, (hidden.requires_grad_(), index))
    torch.library.opcheck(torch.ops.hstree.feature_gather_backward, (grad, index, 6))


def test_compile(device: torch.device) -> None:
    torch._dynamo.reset()

    def loss(hidden: Tensor, index: Tensor) -> Tensor:
        return feature_gather(hidden * 2, index).sin().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 9):
        hidden, index, _ = (x.to(device) for x in batch(rows, 3, 6, 4, torch.float32))
        grads = []
        for function in (loss, compiled):
            leaf = hidden.clone().requires_grad_()
            function(leaf, index).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("change_input", "change_index", "match"),
    [
        (lambda x: x[0], None, r"hidden: expected shape \[N, D\], got \[19\]"),
        (Tensor.int, None, "hidden: expected dtype float32, float64, bfloat16 or float16, got Int"),
        (None, lambda i: i[0], r"feature_index: expected shape \[T, S\], got \[7\]"),
        (None, Tensor.long, "feature_index: expected dtype Int, got Long"),
    ],
    ids=["hidden dim", "hidden dtype", "index dim", "index dtype"],
)
def test_bad_shape_or_dtype(
    change_input: Any, change_index: Any, match: str, device: torch.device
) -> None:
    hidden, index, _ = (x.to(device) for x in batch(9, 3, 19, 7, torch.float32))
    with pytest.raises(RuntimeError, match=f"hstree::feature_gather: {match}"):
        feature_gather(
            change_input(hidden) if change_input else hidden,
            change_index(index) if change_index else index,
        )


@pytest.mark.parametrize(
    ("change", "features", "match"),
    [
        (lambda g: g[0], 19, r"grad: expected shape \[N, T, S\], got \[3, 7\]"),
        (lambda g: g[:, 1:], 19, r"grad: expected size 3 \(trees of feature_index\)"),
        (lambda g: g[:, :, 1:], 19, r"grad: expected size 7 \(features of feature_index\)"),
        (Tensor.int, 19, "grad: expected dtype float32, float64, bfloat16 or float16, got Int"),
        (None, -1, "in_features: expected at least 0, got -1"),
    ],
    ids=["dim", "trees", "features", "dtype", "in_features"],
)
def test_bad_gradient(change: Any, features: int, match: str, device: torch.device) -> None:
    _, index, grad = (x.to(device) for x in batch(9, 3, 19, 7, torch.float32))
    with pytest.raises(RuntimeError, match=f"hstree::feature_gather_backward: {match}"):
        torch.ops.hstree.feature_gather_backward(change(grad) if change else grad, index, features)


@pytest.mark.parametrize(
    ("values", "place", "lowest"),
    [([0, 19], 1, 1), ([-1, 3], 0, 0), ([4, 4], 1, 5), ([4, 3], 1, 5), ([0, 2**31 - 1], 1, 1)],
    ids=["too large", "negative", "duplicate", "unsorted", "largest"],
)
def test_bad_index_value(values: list[int], place: int, lowest: int) -> None:
    hidden, _, _ = batch(3, 1, 19, 2, torch.float32)
    index = torch.tensor([[0, 1], values], dtype=torch.int32)
    match = (
        rf"feature_index\[1, {place}\]: expected a value in \[{lowest}, 19\).*got {values[place]}"
    )
    with pytest.raises(RuntimeError, match=f"hstree::feature_gather: {match}"):
        feature_gather(hidden, index)
    with pytest.raises(RuntimeError, match=f"hstree::feature_gather_backward: {match}"):
        torch.ops.hstree.feature_gather_backward(torch.zeros(3, 2, 2), index, 19)


@pytest.mark.cuda
def test_cuda_gives_nan_where_the_cpu_raises() -> None:
    hidden, _, _ = batch(3, 1, 19, 2, torch.float32)
    index = torch.tensor([[0, 19], [-1, 3]], dtype=torch.int32).cuda()
    output = feature_gather(hidden.cuda(), index)
    assert output[:, [0, 1], [1, 0]].isnan().all()
    assert output[:, [0, 1], [0, 1]].isfinite().all()
