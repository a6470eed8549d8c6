"""The non-local block against its formula, position by position, and against attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from heads.support import allocations
from torch import Tensor

from hstree.lab.layers import NonLocalBlock

C, E = 6, 4
LENGTHS = {1: (7,), 2: (3, 4), 3: (2, 3, 2)}


def build(dimensions: int, **options: Any) -> NonLocalBlock:
    """A block in float64 whose output is not 0."""
    torch.manual_seed(1)
    block = NonLocalBlock(dimensions, C, E, **({"dtype": torch.float64} | options))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0, 0.5)
    return block


def draw(dimensions: int, n: int = 3) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(n, C, *LENGTHS[dimensions], dtype=torch.float64)


def at(layer: Any, x: Tensor) -> Tensor:
    """The linear map of one position."""
    return layer.weight.flatten(1) @ x + layer.bias


@pytest.mark.parametrize("dimensions", LENGTHS)
def test_formula(dimensions: int) -> None:
    block, x = build(dimensions), draw(dimensions)
    z = block(x).flatten(2)
    assert block(x).shape == x.shape
    for n, rows in enumerate(x.flatten(2)):
        positions = rows.unbind(1)
        for i, x_i in enumerate(positions):
            weight = [torch.exp(at(block.theta, x_i) @ at(block.phi, x_k)) for x_k in positions]
            terms = [w * at(block.g, x_k) for w, x_k in zip(weight, positions, strict=True)]
            y_i = torch.stack(terms).sum(0) / torch.stack(weight).sum()
            torch.testing.assert_close(z[n, :, i], x_i + at(block.output, y_i))


@pytest.mark.parametrize("dimensions", LENGTHS)
def test_equals_attention(dimensions: int) -> None:
    block, x = build(dimensions), draw(dimensions)
    theta, phi, g = (layer(x).flatten(2).mT for layer in (block.theta, block.phi, block.g))
    y = F.scaled_dot_product_attention(theta, phi, g, scale=1.0).mT
    torch.testing.assert_close(block(x), x + block.output(y.reshape(3, E, *x.shape[2:])))


def test_starts_as_the_identity() -> None:
    x = draw(2)
    block = NonLocalBlock(2, C, dtype=torch.float64)
    assert torch.equal(block(x), x)
    assert block.inner_channels == 3
    assert NonLocalBlock(1, 1).inner_channels == 1


@pytest.mark.parametrize("dimensions", LENGTHS)
def test_unbatched_and_transformed(dimensions: int) -> None:
    block, x = build(dimensions), draw(dimensions)
    torch.testing.assert_close(block(x[1]), block(x)[1])
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(block)(x), block(x))
    assert block(x[:0]).shape == x[:0].shape


def test_order_of_positions_does_not_matter() -> None:
    block, x = build(1), draw(1)
    order = torch.randperm(x.shape[2])
    torch.testing.assert_close(block(x[..., order]), block(x)[..., order])


def test_gradcheck() -> None:
    block = build(1)
    assert torch.autograd.gradcheck(block, draw(1, 2).requires_grad_())


def test_autocast() -> None:
    block, x = build(2, dtype=torch.float32), draw(2).float()
    with torch.autocast("cpu", torch.bfloat16):
        z = block(x)
    torch.testing.assert_close(z.float(), block(x), rtol=0.05, atol=0.1)


def test_memory_is_one_gate_for_each_pair_of_positions() -> None:
    block = NonLocalBlock(1, 32, 16)
    x = torch.randn(1, 32, 300)
    largest, _ = allocations(lambda: block(x))
    assert largest <= 300 * 300 * 4


@pytest.mark.parametrize(("bias", "count"), [(True, 4 * C * E + 3 * E + C), (False, 4 * C * E)])
def test_parameters(bias: bool, count: int) -> None:
    block = NonLocalBlock(3, C, E, bias)
    assert sum(parameter.numel() for parameter in block.parameters()) == count
    names = [f"{name}.weight" for name in ("theta", "phi", "g", "output")]
    assert [name for name in block.state_dict() if "bias" not in name] == names
    assert f"dimensions=3, channels={C}, inner_channels={E}" in repr(block)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((4, C), "dimensions: expected 1, 2 or 3, got 4"),
        ((2, 0), "channels: expected a whole number of at least 1, got 0"),
        ((2, C, 0), "inner_channels: expected a whole number of at least 1, got 0"),
        ((2, C, 1.5), "inner_channels: expected a whole number of at least 1, got 1.5"),
    ],
)
def test_bad_arguments(arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        NonLocalBlock(*arguments)


@pytest.mark.parametrize("shape", [(C, 3), (2, C + 1, 3, 4), (1, 1, C, 3, 4)], ids=str)
def test_bad_inputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"input: expected shape \[N, 6, H, W\] or \[6, H, W\]"):
        build(2)(torch.zeros(shape, dtype=torch.float64))
