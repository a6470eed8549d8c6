"""Mixtures of experts in place of dense and convolutional layers.

y = sum_k g_k(x) f(W_k * x + c_k), where * is a matrix product or a convolution: one for all
experts, with K times the output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstree._checks import check_int

Size = int | tuple[int, ...]
"""One number for every dimension, or one for each."""


def _identity(input: Tensor) -> Tensor:
    return input


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": F.relu,
        "leaky_relu": F.leaky_relu,
        "elu": F.elu,
        "gelu": F.gelu,
        "silu": F.silu,
        "softplus": F.softplus,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "identity": _identity,
    }
)
"""Activations that have a name."""

GATES = ("softmax", "sigmoid", "constant", "none")


def has_batch(input: Tensor, channels: int, dimensions: int) -> bool:
    """Whether the input is [N, channels, ...] with so many lengths, or [channels, ...]; raises
    ValueError if it is neither."""
    batched = input.dim() == dimensions + 2
    if (batched or input.dim() == dimensions + 1) and input.shape[-dimensions - 1] == channels:
        return batched
    shape = ", ".join([str(channels), *"DHW"[3 - dimensions :]])
    raise ValueError(f"input: expected shape [N, {shape}] or [{shape}], got {tuple(input.shape)}")


def mixture(gate: Tensor, experts: Tensor) -> Tensor:
    """y[n, c, ...] = sum_k gate[n, k, ...] experts[n, k, c, ...]; ... are positions.

    Args:
        gate: [N, K, ...].
        experts: [N, K, C, ...] at the same positions, or [N, K, C], shared by all positions: then
            one matrix product, without a tensor of K C values for every position.

    Returns:
        y [N, C, ...].
    """
    if experts.dim() == 3:
        return torch.einsum("nkc,nk...->nc...", experts, gate)
    return (gate.unsqueeze(2) * experts).sum(1)


class _MixtureOfExperts(nn.Module):
    """What dense and convolutional mixtures share; subclasses set ``experts`` and ``gate``.

    Weight and bias of ``experts`` hold K * out features (channels): those of an expert one after
    the other, expert by expert; with G groups, group by group, in each expert by expert.
    """

    experts: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    gate: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | None

    def __init__(
        self,
        in_size: int,
        out_size: int,
        n_experts: int,
        groups: int,
        gate: str,
        activation: str | Callable[[Tensor], Tensor],
        unit: str,
    ) -> None:
        super().__init__()
        in_size, out_size = check_int(f"in_{unit}", in_size), check_int(f"out_{unit}", out_size)
        n_experts, groups = check_int("n_experts", n_experts), check_int("groups", groups)
        if in_size % groups or out_size % groups:
            raise ValueError(
                f"groups: expected a divisor of in_{unit} and out_{unit}, {in_size} and "
                f"{out_size}, got {groups}"
            )
        if gate not in GATES:
            raise ValueError(f"gate: expected one of {', '.join(GATES)}, got {gate!r}")
        if isinstance(activation, str):
            if activation not in ACTIVATIONS:
                raise ValueError(
                    f"activation: expected a function or one of {', '.join(ACTIVATIONS)}, "
                    f"got {activation!r}"
                )
            activation = ACTIVATIONS[activation]
        elif not callable(activation):
            raise ValueError(
                f"activation: expected a function or its name, got {type(activation).__name__}"
            )
        self.n_experts = n_experts
        self.gate_function = gate
        self.activation = activation
        self._unit, self._in, self._out, self._groups = unit, in_size, out_size, groups

    def reset_parameters(self) -> None:
        """Glorot uniform weights, each expert's as if it were a layer by itself; biases 0."""
        weight = self.experts.weight
        kernel = weight[0, 0].numel()
        fans = weight.shape[1] * kernel + self._out * kernel  # as nn.init counts them
        bound = (6 / fans) ** 0.5
        nn.init.uniform_(weight, -bound, bound)
        if self.gate is not None:
            nn.init.xavier_uniform_(self.gate.weight)
        for layer in (self.experts, self.gate):
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def _mix(self, input: Tensor) -> Tensor:
        """y [N, out, ...] of input [N, in, ...]."""
        score: Tensor = self.experts(input)
        rows, _, *positions = score.shape
        parts = (self._groups, self.n_experts, self._out // self._groups)
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
        return (
            f"in_{self._unit}={self._in}, out_{self._unit}={self._out}, "
            f"n_experts={self.n_experts}, gate={self.gate_function!r}, activation={name}"
        )


class MoEDense(_MixtureOfExperts):
    r"""In place of :class:`torch.nn.Linear` and its activation: a mixture of K dense layers.

        y = sum_k g_k(x) f(W_k x + c_k)

    g is softmax_k(v_k . x + b_k), sigmoid(v_k . x + b_k), constant (1 / K) or none (1, the plain
    sum). It has K (in + 1) out' parameters, out' = out + 1 with softmax and sigmoid gates, out
    without; without biases K in out'.

    Args:
        in_features, out_features: as for :class:`torch.nn.Linear`.
        n_experts: K.
        bias: whether there are c_k and b_k.
        gate: "softmax", "sigmoid", "constant" or "none".
        activation: f, elementwise: a function, a module or a name of :data:`ACTIVATIONS`.
        device, dtype: of the parameters.

    Shape: input [..., in_features], output [..., out_features]; N rows hold N K out_features values
    for the backward pass.

    Parameters: ``experts.weight`` [K * out, in], W_k in rows k * out to (k + 1) * out;
    ``experts.bias`` [K * out]; ``gate.weight`` [K, in]; ``gate.bias`` [K].

    Raises:
        ValueError: an argument is none of these, or the input has another number of features.

    Jacobs et al., Adaptive Mixtures of Local Experts, 1991; initial weights: Glorot and Bengio,
    Understanding the Difficulty of Training Deep Feedforward Neural Networks, 2010.

    >>> layer = MoEDense(20, 30, n_experts=4)
    >>> layer(torch.randn(7, 20)).shape
    torch.Size([7, 30])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        n_experts: int,
        bias: bool = True,
        *,
        gate: str = "softmax",
        activation: str | Callable[[Tensor], Tensor] = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, n_experts, 1, gate, activation, "features")
        self.in_features, self.out_features = in_features, out_features
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.experts = nn.Linear(in_features, n_experts * out_features, **options)
        learned = gate in ("softmax", "sigmoid")
        self.gate = nn.Linear(in_features, n_experts, **options) if learned else None
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """y [..., out_features] of input [..., in_features]."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input: expected shape [..., {self.in_features}], got {tuple(input.shape)}"
            )
        output = self._mix(input.reshape(-1, self.in_features))
        return output.reshape(*input.shape[:-1], self.out_features)


class _MoEConv(_MixtureOfExperts):
    """In place of a convolution and its activation: a mixture of K convolutions,

        y_p = sum_k g_k(x)_p f((W_k * x + c_k)_p)   at every output position p.

    The gate is a convolution over all input channels with kernel, stride, padding and dilation of
    the experts, so that every output position has gates of its own: softmax over k or sigmoid of
    (v_k * x + b_k)_p, constant (1 / K) or none (1, the plain sum). Let w be the number of elements
    of a kernel: there are K (in w / groups + 1) out parameters, and K (in w + 1) more with softmax
    and sigmoid gates; without biases the + 1 in brackets are missing.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, padding_mode: as
            for the convolution of torch.nn.
        n_experts: K.
        bias: whether there are c_k and b_k.
        gate: "softmax", "sigmoid", "constant" or "none".
        activation: f, elementwise: a function, a module or a name of :data:`ACTIVATIONS`.
        device, dtype: of the parameters.

    Shape: input [N, in_channels, ...] or [in_channels, ...], output as of the convolution; K values
    for each element of the output are kept for the backward pass.

    Parameters: ``experts.weight`` [K * out, in / groups, kernel...], with one group W_k in rows
    k * out to (k + 1) * out, with G groups [G, K, out / G, ...] flattened; ``experts.bias``
    [K * out] in the same order; ``gate.weight`` [K, in, kernel...]; ``gate.bias`` [K].

    Raises:
        ValueError: an argument is none of these, or the input has another number of channels or
            dimensions.
    """

    _dimensions: ClassVar[int]
    _convolution: ClassVar[type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        n_experts: int,
        stride: Size = 1,
        padding: Size | Literal["valid", "same"] = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        gate: str = "softmax",
        activation: str | Callable[[Tensor], Tensor] = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, n_experts, groups, gate, activation, "channels")
        self.in_channels, self.out_channels = in_channels, out_channels
        options: dict[str, Any] = {
            "kernel_size": kernel_size,
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "bias": bias,
            "padding_mode": padding_mode,
            "device": device,
            "dtype": dtype,
        }
        convolution = self._convolution
        self.experts = convolution(in_channels, n_experts * out_channels, groups=groups, **options)
        learned = gate in ("softmax", "sigmoid")
        self.gate = convolution(in_channels, n_experts, **options) if learned else None
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """y [N, out_channels, ...] of input [N, in_channels, ...], or both without N."""
        batched = has_batch(input, self.in_channels, self._dimensions)
        return self._mix(input) if batched else self._mix(input.unsqueeze(0)).squeeze(0)


class MoEConv1d(_MoEConv):
    _dimensions = 1
    _convolution = nn.Conv1d


class MoEConv2d(_MoEConv):
    _dimensions = 2
    _convolution = nn.Conv2d


class MoEConv3d(_MoEConv):
    _dimensions = 3
    _convolution = nn.Conv3d
