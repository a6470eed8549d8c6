"""Mixtures of experts that replace dense and convolutional layers.

y = sum_k g_k(x) f(W_k * x + c_k), where * is a matrix product or a convolution. One product or
convolution with K times the output features computes all experts.
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
"""One number for all dimensions, or one number per dimension."""


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
"""Activations by name."""

GATES = ("softmax", "sigmoid", "constant", "none")


def has_batch(input: Tensor, channels: int, dimensions: int) -> bool:
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


class _MixtureOfExperts(nn.Module):
    """Base of dense and convolutional mixtures; subclasses set ``experts`` and ``gate``. Weight and
    bias of ``experts`` have K * out features (channels): expert by expert, in each of G groups."""

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
        """Glorot uniform weights, for each expert as for a separate layer; biases 0."""
        weight = self.experts.weight
        kernel = weight[0, 0].numel()
        fans = weight.shape[1] * kernel + self._out * kernel  # fan-in and fan-out of nn.init
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

    Source: Jacobs, Jordan, Nowlan and Hinton, Adaptive mixtures of local experts, 1991; initial
    weights: Glorot and Bengio, Understanding the difficulty of training deep feedforward neural
    networks, AISTATS 2010.
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
        """The output y [..., out_features] of input [..., in_features]."""
        if input.dim() < 1 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"input: expected shape [..., {self.in_features}], got {tuple(input.shape)}"
            )
        output = self._mix(input.reshape(-1, self.in_features))
        return output.reshape(*input.shape[:-1], self.out_features)


class _MoEConv(_MixtureOfExperts):
    """Base of the convolutional mixtures, which :class:`MoEConv2d` documents."""

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
        options: dict[str, Any] = {"kernel_size": kernel_size, "stride": stride}
        options |= {"padding": padding, "dilation": dilation, "padding_mode": padding_mode}
        options |= {"bias": bias, "device": device, "dtype": dtype}
        convolution = self._convolution
        self.experts = convolution(in_channels, n_experts * out_channels, groups=groups, **options)
        learned = gate in ("softmax", "sigmoid")
        self.gate = convolution(in_channels, n_experts, **options) if learned else None
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """The output y [N, out_channels, ...] of input [N, in_channels, ...]; N is optional."""
        batched = has_batch(input, self.in_channels, self._dimensions)
        return self._mix(input) if batched else self._mix(input.unsqueeze(0)).squeeze(0)


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

    _dimensions = 1
    _convolution = nn.Conv1d


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
        kernel_size, stride, padding, dilation, groups, padding_mode: as for the convolution of
            torch.nn.
        n_experts: number of experts, K.
        bias: whether there are biases c_k and b_k.
        gate: ``"softmax"``, ``"sigmoid"``, ``"constant"`` or ``"none"``.
        activation: elementwise function f: a function, a module or a name of
            :data:`hstree.lab.layers.ACTIVATIONS`.
        device, dtype: of the parameters.

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

    _dimensions = 2
    _convolution = nn.Conv2d


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

    _dimensions = 3
    _convolution = nn.Conv3d
