"""plif and plif_table: the piecewise linear increasing function of learned slopes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hstree.ops import plif, plif_table
from ops.logit_function_cases import PiecewiseCase

SMALL = PiecewiseCase("small", shape=(5, 4), intervals=6)


def spec_plif(x: float, slopes: list[float], radius: float) -> tuple[float, float, list[float]]:
    """f, df/dx and df/dslopes, as published."""
    delta = 2 * radius / len(slopes)
    j = min(max(math.floor((x + radius) / delta), 0), len(slopes) - 1)
    beyond = x - (-radius + j * delta)
    f = slopes[j] * beyond + delta * math.fsum(slopes[:j])
    by_slope = [delta] * j + [beyond] + [0.0] * (len(slopes) - j - 1)
    return f, slopes[j], by_slope


@pytest.mark.parametrize("intervals", [1, 2, 7, 40])
def test_is_as_published(intervals: int, device: torch.device) -> None:
    random = np.random.default_rng(0)
    slopes = random.lognormal(size=intervals)
    x = np.concatenate([[-2.5, 2.5, -4.0, 4.0], random.normal(0.0, 2.0, 60)])
    upstream = random.standard_normal(len(x))
    leaves = [torch.tensor(a, device=device, requires_grad=True) for a in (x, slopes)]
    output = plif(*leaves, 2.5)
    output.backward(torch.tensor(upstream, device=device))
    f, by_x, by_slope = zip(*(spec_plif(a, slopes.tolist(), 2.5) for a in x), strict=True)
    np.testing.assert_allclose(output.detach().cpu(), f, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(leaves[0].grad.cpu(), by_x * upstream, rtol=1e-13)
    expected = (np.array(by_slope) * upstream[:, None]).sum(0)
    np.testing.assert_allclose(leaves[1].grad.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("intervals", [1, 100_000, 1_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_knot_values(intervals: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rounded once, however many; the gradient of a slope is a reverse cumulative sum."""
    random = np.random.default_rng(0)
    slopes = torch.tensor(random.lognormal(size=intervals), dtype=dtype, device=device)
    table = plif_table(slopes.requires_grad_(), 20.0)
    assert table.dtype == dtype
    assert table[0, 0] == 0
    delta = 40 / intervals
    exact = slopes.detach().cpu().double()
    knots = np.cumsum(exact.numpy().astype(np.longdouble)) - exact.numpy()
    rtol = torch.finfo(dtype).eps / 2 + 1e-12
    np.testing.assert_allclose(
        table.detach().cpu().double(),
        np.column_stack([delta * knots.astype(np.float64), delta * exact]),
        rtol=rtol,
        atol=1e-14,
    )
    grad = torch.tensor(random.standard_normal((intervals, 2)), dtype=dtype)
    table.backward(grad.to(device))
    by_knot, by_rise = (g.numpy() for g in grad.double().unbind(1))
    true = delta * (np.cumsum(by_knot[::-1])[::-1] - by_knot + by_rise)
    np.testing.assert_allclose(slopes.grad.cpu(), true, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("size", [1e-250, 1e-30, 1e30, 1e250])
def test_slopes_of_any_size(size: float, device: torch.device) -> None:
    slopes = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64, device=device) * size
    expected = torch.tensor([[0.0, 1.0], [1.0, 2.0], [3.0, 4.0]], dtype=torch.float64) * size
    torch.testing.assert_close(plif_table(slopes, 1.5).cpu(), expected, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_slopes_are_not_lost(bad: float, device: torch.device) -> None:
    slopes = torch.tensor([1.0, bad, 2.0], device=device)
    assert plif_table(slopes, 1.0)[:, 0].isnan().all()


def test_low_precision_slopes_give_a_float32_table(device: torch.device) -> None:
    slopes = torch.tensor([1.0, 3.0], dtype=torch.bfloat16, device=device, requires_grad=True)
    x = torch.tensor([0.5], dtype=torch.bfloat16, device=device)
    output = plif(x, slopes, 1.0)
    output.backward()
    assert output.tolist() == [2.5]
    assert output.dtype == slopes.grad.dtype == torch.bfloat16
    assert slopes.grad.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("slopes", "radius", "match"),
    [
        (torch.ones(2, 2), 1.0, r"slopes: expected shape \[K\], K >= 1, got \(2, 2\)"),
        (torch.ones(0), 1.0, r"slopes: expected shape \[K\], K >= 1, got \(0,\)"),
        (torch.ones(3).int(), 1.0, "slopes: expected a floating-point dtype, got torch.int32"),
        (
            torch.ones(3).double(),
            1.0,
            "slopes: expected torch.float64 with input of torch.float64 and only then, got "
            "torch.float64 with torch.float32",
        ),
        (torch.ones(3), 0.0, "radius: expected a finite number greater than 0, got 0.0"),
        (torch.ones(3), math.nan, "radius: expected a finite number greater than 0, got nan"),
        (torch.ones(3), math.inf, "radius: expected a finite number greater than 0, got inf"),
    ],
    ids=["shape", "no slope", "dtype", "precision", "zero radius", "nan radius", "infinite radius"],
)
def test_bad_slopes_or_radius(slopes: Tensor, radius: float, match: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{match}$"):
        plif(torch.ones(3), slopes, radius)
