"""Recycled memory of operators that are written in Python."""

from __future__ import annotations

import pytest
import torch

from hstree.ops._recycled import recycled


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_shape_and_dtype(dtype: torch.dtype, device: torch.device) -> None:
    like = torch.empty(0, dtype=torch.float64, device=device)
    for shape in ((), (0, 3), (5,), (700, 1000)):
        made = recycled(like, *shape, dtype=dtype)
        assert (made.shape, made.dtype, made.device) == (shape, dtype, like.device)
        assert made.is_contiguous()
    torch.library.opcheck(
        torch.ops.hstree.recycled, (like.cpu(), 7), test_utils=("test_schema", "test_faketensor")
    )


def test_a_block_is_taken_over_and_never_shared() -> None:
    like = torch.empty(0)
    first = recycled(like, 3_000_000).fill_(1)
    second = recycled(like, 3_000_000).fill_(2)
    assert bool((first == 1).all())
    place = first.data_ptr()
    del first
    third = recycled(like, 3_000_000).fill_(3)
    assert third.data_ptr() == place
    assert bool((second == 2).all())


@pytest.mark.parametrize(
    ("like", "count", "match"),
    [
        (torch.empty(0), -1, "count: expected a number of at least 0, got -1"),
        (torch.empty(0, dtype=torch.int64), 3, "like: expected dtype float32, float64, bfloat16"),
    ],
)
def test_bad_arguments(like: torch.Tensor, count: int, match: str) -> None:
    with pytest.raises(RuntimeError, match=match):
        torch.ops.hstree.recycled(like, count)
