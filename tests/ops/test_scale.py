"""hstree::scale_, which multiplies gradients."""

from __future__ import annotations

import pytest
import torch

scale_ = torch.ops.hstree.scale_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0, 1])
def test_is_the_product_rounded_once(shift: int, dtype: torch.dtype, device: torch.device) -> None:
    for size in (0, 1, 7, 8, 33, 5000):
        memory = torch.randn(size + 3, device=device).to(dtype)
        for factor in (1.0, 0.37, -3e-4, 1e6):
            x, before = memory[shift : shift + size], memory.clone()
            scale_(x, torch.tensor(factor, device=device))
            expected = (before[shift : shift + size].float() * factor).to(dtype)
            assert torch.equal(x, expected)
            assert torch.equal(memory[shift + size :], before[shift + size :])
            assert torch.equal(memory[:shift], before[:shift])
            memory = before


def test_bad_arguments(device: torch.device) -> None:
    x, one = torch.zeros(4, 4, device=device), torch.ones((), device=device)
    for bad, factor, match in (
        (x.double(), one, "x: expected dtype float32, bfloat16 or float16, got Double"),
        (x.half().t()[1:], one, r"x: expected a contiguous tensor, got shape \[3, 4\]"),
        (x.half(), x, r"factor: expected one number, got shape \[4, 4\]"),
        (x.half(), one.double(), "factor: expected dtype"),
    ):
        with pytest.raises(RuntimeError, match=match):
            scale_(bad, factor)
