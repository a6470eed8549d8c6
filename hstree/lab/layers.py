r"""Layers that are not output layers: mixtures of experts, and the non-local block.

    y = sum_k g_k(x) f(W_k * x + c_k),    * a matrix product or a convolution

replaces a dense or convolutional layer and its activation f (Jacobs, Jordan, Nowlan and Hinton,
Adaptive mixtures of local experts, 1991; Orhan measures how well conditioned it is, see
:mod:`hstree.lab.jacobian`). One product or convolution with K times the output features computes
all experts. In the non-local block the experts are the positions of the input (Wang et al., CVPR
2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_int

__all__ = [
    "ACTIVATIONS",
    "GATES",
    "MoEConv1d",
    "MoEConv2d",
    "MoEConv3d",
    "MoEDense",
    "NonLocalBlock",
    "mixture",
]

Activation = Callable[[Tensor], Tensor]


def _identity(input: Tensor) -> Tensor:
    return input


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {name: getattr(F, name) for name in ("relu", "leaky_relu", "elu", "gelu", "silu", "softplus")}
    | {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "identity": _identity}
)
"""Activations by name."""

GATES = ("softmax", "sigmoid", "constant", "none")


def _has_batch(input: Tensor, channels: int, dimensions: int) -> bool:
    """Whether the input is [N, channels, ...] rather than [channels, ...], with ``dimensions``
    lengths; raises ValueError if it is neither."""
    batched = input.dim() == dimensions + 2
    if (batched or input.dim() == dimensions + 1) and input.shape[-dimensions - 1] == channels:
        return batched
    shape = ", ".join([str(channels), *"DHW"[3 - dimensions :]])
    raise ValueError(f"input: expected shape [N, {shape}] or [{shape}], got {tuple(input.shape)}")


def mixture(gate: Tensor, experts: Tensor) -> Tensor:
    """y[n, c, ...] = sum_k gate[n, k, ...] experts[n, k, c, ...], where ... are positions.

    Args:
        gate: weights of the experts, [N, K, ...].
        experts: outputs of the experts, [N, K, C, ...] at the same positions, or [N, K, C] shared
            by all positions. The latter takes one matrix product and does not hold K C values for
            every position.

    Returns:
        The mixture y, [N, C, ...].

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
    gate. Weight and bias of ``experts`` have K * out features (channels): expert by expert, in each
    of G groups."""

    layer: ClassVar[Any]

    def __init__(
        self,
        unit: str,
        sizes: tuple[int, int],
        n_experts: int,
        gate: str,
        activation: str | Activation,
        options: dict[str, Any],
        groups: int = 1,
    ) -> None:
        super().__init__()
        (size, out), names = sizes, (f"in_{unit}", f"out_{unit}")
        for name, value in (*zip(names, sizes, strict=True), ("n_experts", n_experts)):
            check_int(name, value)
        groups = check_int("groups", groups)
        if size % groups or out % groups:
            expected = f"a divisor of {' and '.join(names)}, {size} and {out}"
            raise ValueError(f"groups: expected {expected}, got {groups}")
        if gate not in GATES:
            raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}")
        found: Any = activation
        expected, got = "a function or its name", type(activation).__name__
        if isinstance(activation, str):
            found = ACTIVATIONS.get(activation)
            expected, got = f"a function or one of {', '.join(ACTIVATIONS)}", repr(activation)
        if not callable(found):
            raise ValueError(f"activation: expected {expected}, got {got}")
        self.n_experts, self.gate_function = n_experts, gate
        self.activation: Activation = found
        self._unit, self._sizes, self._groups = unit, sizes, groups
        grouped = {"groups": groups} if groups > 1 else {}
        self.experts = self.layer(size, n_experts * out, **options, **grouped)
        learned = gate in ("softmax", "sigmoid")
        self.gate = self.layer(size, n_experts, **options) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform weights, for each expert as for a separate layer; biases 0."""
        weight = self.experts.weight
        kernel = weight[0, 0].numel()
        fans = weight.shape[1] * kernel + self._sizes[1] * kernel  # fan-in and fan-out of nn.init
        bound = (6 / fans) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
        if self.gate is not None:
            nn.init.xavier_uniform_(self.gate.weight)
        for layer in (self.experts, self.gate):
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def _mix(self, input: Tensor) -> Tensor:
        """The mixture y [N, out, ...] of input [N, in, ...]."""
        score: Tensor = self.experts(input)
        rows, _, *positions = score.shape
        parts = (self._groups, self.n_experts, self._sizes[1] // self._groups)
        value = self.activation(score).reshape(rows, *parts, *positions)
        value = value.transpose(1, 2).flatten(2, 3)  # [N, K, out, ...]
        if self.gate is None:
            mixed = value.mean(1) if self.gate_function == "constant" else value.sum(1)
        else:
            gate = self.gate(input)
            gate = gate.softmax(1) if self.gate_function == "softmax" else gate.sigmoid()
            mixed = mixture(gate, value)
        return mixed.to(score.dtype)  # under autocast, sums and softmax may be wider

    def extra_repr(self) -> str:
        name = getattr(self.activation, "__name__", type(self.activation).__name__).strip("_")
        size, out = self._sizes
        return (
            f"in_{self._unit}={size}, out_{self._unit}={out}, "
            f"n_experts={self.n_experts}, gate={self.gate_function!r}, activation={name}"
        )


class MoEDense(_Mixture):
    r"""A mixture of K dense layers that replaces :class:`torch.nn.Linear` and its activation.

    y = sum_k g_k(x) f(W_k x + c_k). The gate g_k is softmax_k(v_k . x + b_k),
    sigmoid(v_k . x + b_k), constant (1 / K), or none (1, a plain sum). There are K (in + 1) out'
    parameters, or K in out' without biases, where out' is out + 1 with a softmax or sigmoid gate
    and out with the others.

    Shape: input [..., in_features], output [..., out_features]. The backward pass needs
    N K out_features values for N rows.

    Parameters: ``experts.weight`` [K * out, in], with W_k in rows k * out to (k + 1) * out - 1;
    ``experts.bias`` [K * out]; ``gate.weight`` [K, in]; ``gate.bias`` [K].

    Args:
        in_features, out_features: numbers of input and output features.
        n_experts: number of experts, K.
        bias: whether there are biases c_k and b_k.
        gate: ``"softmax"``, ``"sigmoid"``, ``"constant"`` or ``"none"``.
        activation: elementwise function f: a function, a module or a name of
            :data:`hstree.lab.layers.ACTIVATIONS`.
        device, dtype: of the parameters.

    Raises:
        ValueError: for an argument out of range, or an input with another number of features.

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
        bias: bool = True,
        *,
        gate: str = "softmax",
        activation: str | Activation = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = {"bias": bias, "device": device, "dtype": dtype}
        sizes = in_features, out_features
        super().__init__("features", sizes, n_experts, gate, activation, options)
        self.in_features, self.out_features = sizes

    def forward(self, input: Tensor) -> Tensor:
        """The output y [..., out_features] of input [..., in_features]."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            expected = f"expected shape [..., {self.in_features}]"
            raise ValueError(f"input: {expected}, got {tuple(input.shape)}")
        output = self._mix(input.reshape(-1, self.in_features))
        return output.reshape(*input.shape[:-1], self.out_features)


class _MoEConv(_Mixture):
    """Base of the convolutional mixtures, which :class:`MoEConv2d` documents."""

    _dimensions: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        n_experts: int,
        *,
        gate: str = "softmax",
        activation: str | Activation = "relu",
        groups: int = 1,
        **options: Any,
    ) -> None:
        sizes = in_channels, out_channels
        options["kernel_size"] = kernel_size
        super().__init__("channels", sizes, n_experts, gate, activation, options, groups)
        self.in_channels, self.out_channels = sizes

    def forward(self, input: Tensor) -> Tensor:
        """The output y [N, out_channels, ...] of input [N, in_channels, ...]; N is optional."""
        batched = _has_batch(input, self.in_channels, self._dimensions)
        return self._mix(input) if batched else self._mix(input.unsqueeze(0)).squeeze(0)


class MoEConv2d(_MoEConv):
    """A mixture of K convolutions that replaces :class:`torch.nn.Conv2d` and its activation.

    At every output position p, y_p = sum_k g_k(x)_p f((W_k * x + c_k)_p). Every output position has
    its own gate: the softmax over k or the sigmoid of (v_k * x + b_k)_p, constant (1 / K), or none
    (1, a plain sum). v_k is a convolution over all input channels with the kernel size, stride,
    padding and dilation of the experts. With w elements in a kernel there are
    K (in w / groups + 1) out parameters, and K (in w + 1) more with a softmax or sigmoid gate. Each
    + 1 is for the biases.

    Shape: input [N, in_channels, ...] or [in_channels, ...], output as for the convolution. The
    backward pass needs K values for each element of the output.

    Parameters: ``experts.weight`` [K * out, in / groups, kernel...], with W_k in rows k * out to
    (k + 1) * out - 1 for one group, or [G, K, out / G, ...] flattened for G groups;
    ``experts.bias`` [K * out] in the same order; ``gate.weight`` [K, in, kernel...];
    ``gate.bias`` [K].

    Args:
        in_channels, out_channels: numbers of input and output channels.
        kernel_size: as for the convolution of torch.nn.
        n_experts: number of experts, K.
        gate: ``"softmax"``, ``"sigmoid"``, ``"constant"`` or ``"none"``.
        activation: elementwise function f: a function, a module or a name of
            :data:`hstree.lab.layers.ACTIVATIONS`.
        groups: of the experts; the gate reads all channels.
        options: others of the convolution, such as stride, padding, bias, device and dtype.

    Raises:
        ValueError: for an argument out of range, or an input with another number of channels or
            dimensions.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import MoEConv2d
        >>> layer = MoEConv2d(3, 8, 3, n_experts=4, padding=1)
        >>> layer(torch.randn(2, 3, 16, 16)).shape
        torch.Size([2, 8, 16, 16])
    """

    _dimensions, layer = 2, nn.Conv2d


class MoEConv1d(_MoEConv):
    """A mixture of K convolutions that replaces :class:`torch.nn.Conv1d` and its activation.

    The formula, the arguments and the parameters are those of :class:`MoEConv2d`.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import MoEConv1d
        >>> layer = MoEConv1d(3, 8, 3, n_experts=4, padding=1)
        >>> layer(torch.randn(2, 3, 16)).shape
        torch.Size([2, 8, 16])
    """

    _dimensions, layer = 1, nn.Conv1d


class MoEConv3d(_MoEConv):
    """A mixture of K convolutions that replaces :class:`torch.nn.Conv3d` and its activation.

    The formula, the arguments and the parameters are those of :class:`MoEConv2d`.

    Example:
        >>> import torch
        >>> from hstree.lab.layers import MoEConv3d
        >>> layer = MoEConv3d(3, 8, 3, n_experts=4, padding=1)
        >>> layer(torch.randn(2, 3, 4, 8, 8)).shape
        torch.Size([2, 8, 4, 8, 8])
    """

    _dimensions, layer = 3, nn.Conv3d


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

    Source: Wang, Girshick, Gupta and He, Non-local neural networks, CVPR 2018, equations 1, 5, 6.
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
        convolutions = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
        if dimensions not in convolutions:
            raise ValueError(f"dimensions: expected 1, 2 or 3, got {dimensions!r}")
        channels = check_int("channels", channels)
        inner_channels = check_int(
            "inner_channels", max(1, channels // 2) if inner_channels is None else inner_channels
        )
        self.dimensions, self.channels, self.inner_channels = dimensions, channels, inner_channels
        convolution = convolutions[dimensions]
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
        batched = _has_batch(input, self.channels, self.dimensions)
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
