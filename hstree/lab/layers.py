r"""Layers that are not output layers: mixtures of experts, and the non-local block.

    y = sum_k g_k(x) f(W_k * x + c_k),    * a matrix product or a convolution

replaces a dense or convolutional layer and its activation f (Jacobs, Jordan, Nowlan and Hinton,
Adaptive mixtures of local experts, 1991; Orhan measures how well conditioned it is, see
:mod:`hstree.lab.jacobian`). One product or convolution with K times the output features computes
all experts. In the non-local block the experts are the positions of the input (Wang et al., CVPR
2018).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_choice, check_int

__all__ = ["ACTIVATIONS", "GATES", "MoEConv2d", "MoEDense", "NonLocalBlock", "mixture"]

Activation = Callable[[Tensor], Tensor]


ACTIVATIONS: dict[str, Activation] = {
    **{name: getattr(F, name) for name in ("relu", "gelu", "silu", "softplus", "tanh")},
    "identity": torch.positive,
}
GATES = ("softmax", "sigmoid", "constant", "none")


def mixture(gate: Tensor, experts: Tensor) -> Tensor:
    """y[n, c, ...] = sum_k gate[n, k, ...] experts[n, k, c, ...], where ... are positions.

    ``experts``: outputs of the experts, [N, K, C, ...] at the same positions, or [N, K, C] shared
    by all positions, which does not hold K C values for every position.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import mixture
        >>> mixture(torch.tensor([[0.25, 0.75]]), torch.tensor([[[4.0, 0.0], [0.0, 8.0]]]))
        tensor([[1., 6.]])
    """
    if experts.dim() == 3:
        return torch.einsum("nkc,nk...->nc...", experts, gate)
    return (gate.unsqueeze(2) * experts).sum(1)


class _Mixture(nn.Module):
    """Base of dense and convolutional mixtures: ``layer`` is the torch layer that makes experts and
    gate."""

    layer: ClassVar[Any]

    def __init__(
        self,
        size: int,
        out: int,
        n_experts: int,
        gate: str,
        activation: str | Activation,
        **options: Any,
    ) -> None:
        super().__init__()
        check_int("n_experts", n_experts)
        self.gate_function = check_choice("gate", gate, GATES)
        if isinstance(activation, str):
            activation = ACTIVATIONS[check_choice("activation", activation, ACTIVATIONS)]
        self.out, self.n_experts, self.activation = out, n_experts, activation
        self.experts = self.layer(size, n_experts * out, **options)
        learned = gate in ("softmax", "sigmoid")
        self.gate = self.layer(size, n_experts, **options) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform weights, for each expert as for a separate layer; biases 0."""
        weight = self.experts.weight
        kernel = weight[0, 0].numel()
        fans = weight.shape[1] * kernel + self.out * kernel  # fan-in and fan-out of nn.init
        bound = (6 / fans) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
        if self.gate is not None:
            nn.init.xavier_uniform_(self.gate.weight)
        for layer in (self.experts, self.gate):
            if layer is not None:
                nn.init.zeros_(layer.bias)

    def _mix(self, input: Tensor) -> Tensor:
        """The mixture y [N, out, ...] of input [N, in, ...]."""
        mixed: Tensor
        score: Tensor = self.experts(input)
        value = self.activation(score)
        value = value.reshape(len(score), self.n_experts, self.out, *score.shape[2:])
        if self.gate is None:
            mixed = value.mean(1) if self.gate_function == "constant" else value.sum(1)
        else:
            gate = self.gate(input)
            gate = gate.softmax(1) if self.gate_function == "softmax" else gate.sigmoid()
            mixed = mixture(gate, value)
        # Under autocast, sums and softmax may be wider.
        return mixed.to(score.dtype)

    def extra_repr(self) -> str:
        return f"n_experts={self.n_experts}, gate={self.gate_function!r}"


class MoEDense(_Mixture):
    """A mixture of K dense layers that replaces :class:`torch.nn.Linear` and its activation.

    y = sum_k g_k(x) f(W_k x + c_k). The gate g_k is softmax_k(v_k . x + b_k),
    sigmoid(v_k . x + b_k), constant (1 / K), or none (1, a plain sum). There are K (in + 1) out
    parameters, and K (in + 1) more with a softmax or sigmoid gate.

    Shape: input [..., in_features], output [..., out_features]. Parameters: ``experts.weight``
    [K * out, in], expert by expert; ``experts.bias``; ``gate.weight`` [K, in]; ``gate.bias``.
    ``activation``: elementwise function f: a function, a module or a name of :data:`ACTIVATIONS`.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import MoEDense
        >>> layer = MoEDense(20, 30, n_experts=4)
        >>> layer(torch.randn(7, 20)).shape
        torch.Size([7, 30])
    """

    layer = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_experts: int,
        *,
        gate: str = "softmax",
        activation: str | Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"device": device, "dtype": dtype}
        super().__init__(in_features, out_features, n_experts, gate, activation, **options)

    def forward(self, input: Tensor) -> Tensor:
        """The output y [..., out_features] of input [..., in_features]."""
        output = self._mix(input.reshape(-1, input.shape[-1]))
        return output.reshape(*input.shape[:-1], self.out)


class MoEConv2d(_Mixture):
    """A mixture of K convolutions that replaces :class:`torch.nn.Conv2d` and its activation.

    At every output position p, y_p = sum_k g_k(x)_p f((W_k * x + c_k)_p), with gates as for
    :class:`MoEDense`, the scores of which are a convolution too.

    Shape: input [N, in_channels, H, W], output as for the convolution. The backward pass needs K
    values for each element of the output. Parameters: ``experts.weight`` [K * out, in, h, w],
    expert by expert; ``experts.bias``; ``gate.weight`` [K, in, h, w]; ``gate.bias``.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import MoEConv2d
        >>> layer = MoEConv2d(3, 8, 3, n_experts=4, padding=1)
        >>> layer(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    layer = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        n_experts: int,
        *,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        gate: str = "softmax",
        activation: str | Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride, "padding": padding}
        options |= {"device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, n_experts, gate, activation, **options)

    def forward(self, input: Tensor) -> Tensor:
        """The output y [N, out_channels, H', W'] of input [N, in_channels, H, W]."""
        _check_images(input)
        return self._mix(input)


def _check_images(input: Tensor) -> None:
    if input.dim() != 4:
        raise ValueError(f"input: expected shape [N, C, H, W], got {tuple(input.shape)}")


class NonLocalBlock(nn.Module):
    r"""The non-local block with embedded Gaussian gates (Wang et al., equations 1, 5 and 6).

    It is a mixture of experts over the positions k of the input::

        y_i = sum_k g_k(x_i, x) f_k(x),   z_i = x_i + W_z y_i + b_z

    The gate g_k(x_i, x) is the softmax over k of theta(x_i) . phi(x_k). The expert
    f_k(x) = W_g x_k + b_g is shared by all positions i. theta and phi are linear maps of a
    position.

    Equivalent to dot-product attention without scaling::

        theta, phi, g = (layer(x).flatten(2).mT for layer in (block.theta, block.phi, block.g))
        y = F.scaled_dot_product_attention(theta, phi, g, scale=1.0)

    Shape: input and output [N, C, H, W]. The gates of all pairs of positions, N (H W)^2 values, are
    held. W_z and b_z start at 0, so the block starts as the identity. There are 4 C E + 3 E + C
    parameters, E = ``inner_channels``, by default half of C. ``options``: device and dtype.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import NonLocalBlock
        >>> block = NonLocalBlock(channels=16)
        >>> block(torch.randn(4, 16, 7, 7)).shape
        torch.Size([4, 16, 7, 7])
    """

    def __init__(self, channels: int, inner_channels: int | None = None, **options: Any) -> None:
        super().__init__()
        inner = max(1, channels // 2) if inner_channels is None else inner_channels
        self.theta, self.phi, self.g = (nn.Conv2d(channels, inner, 1, **options) for _ in range(3))
        self.output = nn.Conv2d(inner, channels, 1, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform weights, biases 0; the output's weights 0."""
        for layer in (self.theta, self.phi, self.g, self.output):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.get_parameter("bias"), 0)
        nn.init.zeros_(self.output.weight)

    def forward(self, input: Tensor) -> Tensor:
        """The output z, of the shape of the input."""
        _check_images(input)
        theta, phi, g = (layer(input).flatten(2) for layer in (self.theta, self.phi, self.g))
        gate = torch.matmul(phi.mT, theta).softmax(1)  # [N, K, I]: sums to 1 over positions k
        y = mixture(gate, g.mT)  # [N, E, I]
        z: Tensor = input + self.output(y.reshape(*y.shape[:2], *input.shape[2:]))
        return z
