"""torch.ops.hstree.sparse_adam_."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference.sparse_adam import sparse_adam_reference
from torch import Tensor

from hstree.ops import sparse_adam_
from ops.apart import every_instruction_set, with_instruction_set
from ops.cases import DTYPES, name_of, threads

RULE: dict[str, Any] = {
    "lr": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.3
}  # fmt: skip
SHAPES = [  # weight, dimensions of the index, visited rows
    ((3, 40, 19), 2, 70),
    ((2, 30, 200), 2, 13),
    ((4, 16), 1, 3),
    ((300,), 1, 200),  # runs of one element
    ((3, 200), 2, 333),
    ((2, 9, 3, 5), 2, 6),
    ((20, 3, 5), 1, 8),
    ((3, 7, 5), 2, 21),  # every row
    ((3, 7, 5), 2, 0),
    ((0, 7, 5), 2, 0),
    ((3, 7, 0), 2, 4),
    ((3, 7, 8), 2, 11),  # whole packs on CUDA
    ((2, 300, 1), 2, 580),  # several blocks of rows
    ((1, 3, 2060), 2, 2),  # several rounds of a block
]
Shape = tuple[int, ...]


def draw(
    shape: Shape, sparse: int, visited: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """weight, exp_avg, exp_avg_sq, index and values."""
    random = np.random.default_rng(seed)
    place = np.sort(random.choice(np.prod(shape[:sparse]), visited, replace=False))
    index = torch.from_numpy(np.stack(np.unravel_index(place, shape[:sparse]))).long()
    weight, exp_avg = (torch.from_numpy(random.standard_normal(shape)) for _ in range(2))
    exp_avg_sq = torch.from_numpy(random.random(shape))
    values = torch.from_numpy(random.standard_normal((visited, *shape[sparse:])))
    moments = torch.promote_types(dtype, torch.float32)
    return [weight.to(dtype), exp_avg.to(moments), exp_avg_sq.to(moments), index, values.to(dtype)]


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.99), (0.9, 0.0)], ids=str)
def test_first_moment_or_second_of_the_last_gradient_alone(
    betas: tuple[float, float], device: torch.device
) -> None:
    """exp_avg and exp_avg_sq to a rounding or two, and the weight to a few roundings of the terms
    of its difference, which may cancel: w = 0.1 and a step of 0.1."""
    shape, sparse, visited = SHAPES[0]
    rule = RULE | {"beta1": betas[0], "beta2": betas[1], "lr": 0.1, "step": 3}
    for seed in range(5):
        state = draw(shape, sparse, visited, torch.float32, seed)
        weight, *_, index, values = state
        true = [x.double() for x in state[:3]]
        sparse_adam_reference(*true, index, values.double(), **rule)
        step = true[0] - weight.double() * (1 - rule["lr"] * rule["weight_decay"])
        scale = (weight.abs() + step.abs(), true[1].abs() + 1, true[2])
        on_device = [x.to(device) for x in state]
        sparse_adam_(*on_device, **rule)
        for got, expected, terms in zip(on_device, true, scale, strict=False):
            assert ((got.cpu().double() - expected).abs() <= 4 * 2.0**-24 * terms).all()


def check(case: tuple[Shape, int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Two steps, the truth in float64; rows that are not visited keep every bit. Returns weight and
    moments."""
    shape, sparse, visited = case
    maximize = (SHAPES.index(case) + DTYPES.index(dtype)) % 2 == 1
    state = [x.to(device) for x in draw(shape, sparse, visited, dtype)[:3]]
    sums = 1e-14 if dtype == torch.float64 else 5e-7
    unit = max(torch.finfo(dtype).eps / 2, sums)
    for step in (1, 2):
        *_, index, values = (x.to(device) for x in draw(shape, sparse, visited, dtype, step))
        before = [x.clone() for x in state]
        true = [x.double() for x in state]
        rule = RULE | {"step": step, "maximize": maximize}
        sparse_adam_reference(*true, index, values.double(), **rule)
        sparse_adam_(*state, index, values, **rule)
        for got, expected, tolerance in zip(state, true, (unit, sums, sums), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1.01 * tolerance, atol=sums)
        other = torch.ones(shape[:sparse], dtype=torch.bool, device=device)
        other[tuple(index)] = False
        for got, old in zip(state, before, strict=True):
            assert torch.equal(got[other], old[other])
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_equals_reference(
    case: tuple[Shape, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    check(case, dtype, device)


def test_literal_values(device: torch.device) -> None:
    """beta 1/2 and 3/4 at step 1: m = g / 2, v = g^2 / 4, the corrected ones g and g^2."""
    weight = torch.ones(2, 2, 2, device=device)
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    index = torch.tensor([[0, 1], [1, 0]], device=device)
    values = torch.tensor([[4.0, -2.0], [0.0, 8.0]], device=device)
    rule = {"step": 1, "lr": 0.25, "beta1": 0.5, "beta2": 0.75, "eps": 1.0, "weight_decay": 0.5}
    sparse_adam_(weight, m, v, index, values, **rule)
    # 1 - lr weight_decay = 7/8; lr g / (|g| + 1) = 1/5, -1/6, 0, 2/9
    assert m.tolist() == [[[0, 0], [2, -1]], [[0, 4], [0, 0]]]
    assert v.tolist() == [[[0, 0], [4, 1]], [[0, 16], [0, 0]]]
    expected = torch.tensor(
        [[[1, 1], [7 / 8 - 1 / 5, 7 / 8 + 1 / 6]], [[7 / 8, 7 / 8 - 2 / 9], [1, 1]]], device=device
    )
    torch.testing.assert_close(weight, expected)


def test_infinities_and_nan_stay_in_their_elements(device: torch.device) -> None:
    weight, m, v, index, values = (x.to(device) for x in draw((4, 19), 1, 3, torch.float32))
    values[0, 3], values[1, 18] = torch.nan, torch.inf
    sparse_adam_(weight, m, v, index, values, step=1, **RULE)
    bad = torch.zeros(4, 19, dtype=torch.bool, device=device)
    bad[index[0, 0], 3] = bad[index[0, 1], 18] = True
    assert torch.equal(~weight.isfinite(), bad)
    assert torch.equal(~m.isfinite(), bad)
    assert torch.equal(~v.isfinite(), bad)


def test_noncontiguous_gradient(device: torch.device) -> None:
    tensors = [x.to(device) for x in draw((3, 40, 19), 2, 70, torch.float32)]
    *state, index, values = tensors
    other = [x.clone() for x in state]
    sparse_adam_(*state, index, values, step=3, **RULE)
    sparse_adam_(*other, index.t().contiguous().t(), values.t().contiguous().t(), step=3, **RULE)
    assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True))


MANY = ((5, 300, 100), 2, 900)


def after_one_step(dtype: torch.dtype, case: tuple[Shape, int, int] = MANY) -> list[Tensor]:
    *state, index, values = draw(*case, dtype)
    sparse_adam_(*state, index, values, step=3, **RULE)
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_same_bits_for_every_number_of_threads(dtype: torch.dtype) -> None:
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(after_one_step(dtype))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def steps() -> list[Tensor]:
    return [x for case in SHAPES for dtype in DTYPES for x in after_one_step(dtype, case)]


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """The same to one rounding, and on x86-64 the same bits."""
    results = with_instruction_set(capability, "ops.test_sparse_adam", "steps()", tmp_path)
    for got, expected in zip(results, steps(), strict=True):
        torch.testing.assert_close(got, expected)
        if os.uname().machine == "x86_64":
            assert torch.equal(got, expected)


def test_opcheck(device: torch.device) -> None:
    tensors = [x.to(device) for x in draw((3, 40, 19), 2, 7, torch.float32)]
    op = torch.ops.hstree.sparse_adam_
    torch.library.opcheck(op, (*tensors, 2, *RULE.values()))


def test_autograd_sees_the_change() -> None:
    """A backward pass through what the weight was before is refused, not wrong."""
    *state, index, values = draw((4, 5), 1, 2, torch.float32)
    weight = state[0].requires_grad_()
    loss = (weight * weight).sum()
    with torch.no_grad():
        sparse_adam_(*state, index, values, step=1, **RULE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


BAD = {
    "weight": [
        (Tensor.int, "expected dtype float32, float64, bfloat16 or float16, got Int"),
        (lambda x: x.transpose(0, 1), "expected a contiguous tensor"),
    ],
    "exp_avg": [
        (Tensor.double, "expected dtype Float, got Double"),
        (lambda x: x[:1], r"expected the shape of weight, \[3, 40, 19\], got \[1, 40, 19\]"),
        (lambda x: x[0], r"expected the shape of weight, \[3, 40, 19\], got \[40, 19\]"),
        (lambda x: x.mT.contiguous().mT, "expected a contiguous tensor"),
    ],
    "exp_avg_sq": [
        (Tensor.bfloat16, "expected dtype Float, got BFloat16"),
        (lambda x: x[..., 1:], r"expected the shape of weight, \[3, 40, 19\], got \[3, 40, 18\]"),
    ],
    "index": [
        (lambda x: x[0], r"expected shape \[1, nnz\] or \[2, nnz\], got \[7\]"),
        (lambda x: x[[0, 1, 0]], r"expected shape \[1, nnz\] or \[2, nnz\].*got \[3, 7\]"),
        (lambda x: x[:0], r"expected shape \[1, nnz\] or \[2, nnz\].*got \[0, 7\]"),
        (Tensor.int, "expected dtype Long, got Int"),
    ],
    "values": [
        (lambda x: x[1:], r"expected shape \[nnz, ...\] with nnz = 7 .*\[3, 40, 19\], got \[6, 19"),
        (lambda x: x[:, 1:], r"expected shape \[nnz, ...\] with nnz = 7 .*, got \[7, 18\]"),
        (lambda x: x[:, 0], r"expected shape \[nnz, ...\] with nnz = 7 .*, got \[7\]"),
        (Tensor.double, "expected dtype Float, got Double"),
    ],
}


@pytest.mark.parametrize(
    ("name", "change", "match"), [(name, *bad) for name, some in BAD.items() for bad in some]
)
def test_bad_tensor(name: str, change: Any, match: str, device: torch.device) -> None:
    tensors = [x.to(device) for x in draw((3, 40, 19), 2, 7, torch.float32)]
    place = ["weight", "exp_avg", "exp_avg_sq", "index", "values"].index(name)
    tensors[place] = change(tensors[place])
    with pytest.raises(RuntimeError, match=f"hstree::sparse_adam_: {name}: {match}"):
        sparse_adam_(*tensors, step=1, **RULE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"step": 0}, "step: expected at least 1, got 0"),
        ({"lr": -1.0}, r"lr: expected a value in \[0, inf\), got -1"),
        ({"lr": torch.nan}, r"lr: expected a value in \[0, inf\), got nan"),
        ({"beta1": 1.0}, r"beta1: expected a value in \[0, 1\), got 1"),
        ({"beta2": -0.5}, r"beta2: expected a value in \[0, 1\), got -0.5"),
        ({"eps": torch.inf}, r"eps: expected a value in \[0, inf\), got inf"),
        ({"weight_decay": -0.1}, r"weight_decay: expected a value in \[0, inf\), got -0.1"),
    ],
)
def test_bad_number(change: dict[str, float], match: str) -> None:
    tensors = draw((3, 40, 19), 2, 7, torch.float32)
    with pytest.raises(RuntimeError, match=f"hstree::sparse_adam_: {match}"):
        sparse_adam_(*tensors, **RULE | {"step": 1} | change)


@pytest.mark.parametrize(
    ("index", "match"),
    [
        ([[0, 3], [1, 1]], r"index\[0, 1\]: expected a value in \[0, 3\), got 3"),
        ([[-1, 0], [1, 1]], r"index\[0, 0\]: expected a value in \[0, 3\), got -1"),
        ([[0, 1], [7, 1]], r"index\[1, 0\]: expected a value in \[0, 7\), got 7"),
        ([[0, 1], [1, -(2**62)]], r"index\[1, 1\]: expected a value in \[0, 7\), got -4"),
        (
            [[1, 1], [2, 2]],
            "index: expected strictly increasing rows.*row 9 at place 1 after row 9",
        ),
        (
            [[1, 0], [0, 2]],
            "index: expected strictly increasing rows.*row 2 at place 1 after row 7",
        ),
    ],
)
def test_bad_index_writes_nothing(index: list[list[int]], match: str) -> None:
    *state, _, values = draw((3, 7, 5), 2, 2, torch.float32)
    before = [x.clone() for x in state]
    with pytest.raises(RuntimeError, match=f"hstree::sparse_adam_: {match}"):
        sparse_adam_(*state, torch.tensor(index), values, step=1, **RULE)
    assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))


def test_bad_index_of_one_dimension() -> None:
    *state, _, values = draw((7, 5), 1, 2, torch.float32)
    match = r"index\[0, 1\]: expected a value in \[0, 7\), got 7"
    with pytest.raises(RuntimeError, match=match):
        sparse_adam_(*state, torch.tensor([[0, 7]]), values, step=1, **RULE)


@pytest.mark.cuda
def test_devices_must_agree() -> None:
    tensors = draw((3, 7, 5), 2, 4, torch.float32)
    for place in range(1, 5):
        mixed = [x if i == place else x.cuda() for i, x in enumerate(tensors)]
        with pytest.raises(RuntimeError, match="expected device cuda:0, got cpu"):
            sparse_adam_(*mixed, step=1, **RULE)
