"""The non-local block: a mixture of experts whose experts are the positions of the input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hstree._checks import check_int

from .mixture_of_experts import has_batch, mixture

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class NonLocalBlock(nn.Module):
    r"""The non-local block with embedded Gaussian gates, for inputs with 1, 2 or 3 dimensions.

    It is a mixture of experts over the positions k of the input::

        y_i = sum_k g_k(x_i, x) f_k(x),   z_i = x_i + W_z y_i + b_z

    The gate g_k(x_i, x) is the softmax over k of theta(x_i) . phi(x_k). The expert
    f_k(x) = W_g x_k + b_g is shared by all positions i. theta and phi are linear maps of a
    position.

    Equivalent to dot-product attention without scaling::

        theta, phi, g = (layer(x).flatten(2).mT for layer in (block.theta, block.phi, block.g))
        y = F.scaled_dot_product_attention(theta, phi, g, scale=1.0)

    Shape: input and output [N, C, ...] or [C, ...] with ``dimensions`` lengths. The gates of all
    pairs of P positions, N P P values, are held. W_z and b_z start at 0, so the block starts as the
    identity. There are 4 C E + 3 E + C parameters, or 4 C E without biases.

    Args:
        dimensions: number of dimensions of a position: 1, 2 or 3.
        channels: number of channels, C.
        inner_channels: number of channels of theta, phi, g and y, E; None: half of C, at least 1.
        bias: whether the four linear maps have biases.
        device, dtype: of the parameters.

    Raises:
        ValueError: for an argument out of range, or an input with another number of channels or
            dimensions.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import NonLocalBlock
        >>> block = NonLocalBlock(2, channels=16)
        >>> block(torch.randn(4, 16, 7, 7)).shape
        torch.Size([4, 16, 7, 7])

    Source: Wang, Girshick, Gupta and He, Non-local neural networks, CVPR 2018, equations 1, 5
    (softmax) and 6.
    """

    def __init__(
        self,
        dimensions: int,
        channels: int,
        inner_channels: int | None = None,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dimensions not in _CONVOLUTIONS:
            raise ValueError(f"dimensions: expected 1, 2 or 3, got {dimensions!r}")
        channels = check_int("channels", channels)
        inner_channels = check_int(
            "inner_channels", max(1, channels // 2) if inner_channels is None else inner_channels
        )
        self.dimensions, self.channels, self.inner_channels = dimensions, channels, inner_channels
        convolution = _CONVOLUTIONS[dimensions]
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.theta = convolution(channels, inner_channels, 1, **options)
        self.phi = convolution(channels, inner_channels, 1, **options)
        self.g = convolution(channels, inner_channels, 1, **options)
        self.output = convolution(inner_channels, channels, 1, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform weights, biases 0; the output's weights 0."""
        for layer in (self.theta, self.phi, self.g, self.output):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.output.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The output z, of the shape of the input."""
        batched = has_batch(input, self.channels, self.dimensions)
        x = input if batched else input.unsqueeze(0)
        theta, phi, g = (layer(x).flatten(2) for layer in (self.theta, self.phi, self.g))
        gate = torch.matmul(phi.mT, theta).softmax(1)  # [N, K, I]: sums to 1 over positions k
        y = mixture(gate, g.mT)  # [N, E, I]
        z: Tensor = x + self.output(y.reshape(*y.shape[:2], *x.shape[2:]))
        return z if batched else z.squeeze(0)

    def extra_repr(self) -> str:
        return (
            f"dimensions={self.dimensions}, channels={self.channels}, "
            f"inner_channels={self.inner_channels}"
        )
