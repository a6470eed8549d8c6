"""Conditioning of layers: singular values of their Jacobians dy/dx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hstree._progress import track
from hstree.lab.layers import ACTIVATIONS, GATES, MoEDense

THRESHOLDS = (0.1, 0.01, 0.001)
"""Thresholds for counting singular values, as shares of the largest."""

_CHUNK_BYTES = 2**27


def jacobian_singular_values(
    layer: Callable[[Tensor], Tensor], inputs: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """Singular values of dy/dx at each input, largest first.

    Equivalent, input by input, to

        jacobian = torch.func.jacrev(lambda x: layer(x[None])[0])(x)
        torch.linalg.svdvals(jacobian.reshape(y.numel(), x.numel()))

    Args:
        layer: module or function of inputs [N, ...] that treats each input independently (in eval
            mode if there is batch normalization), and that torch.func can transform.
        inputs: inputs x, [N, ...], floating point.
        chunk_size: number of inputs whose Jacobians are in memory at a time. A Jacobian has
            (elements of y) x (elements of x) numbers, and the layer's intermediate gradients need
            memory too. None: as many as fit in 128 MiB of Jacobians.

    Returns:
        Singular values, [N, min(elements of y, elements of x)], in the dtype of the Jacobian.

    Raises:
        ValueError: the inputs are not a batch with at least one element each, are not floating
            point, or the chunk size is below 1.

    Example:
        >>> import torch
        >>> from hstree.lab import jacobian_singular_values
        >>> jacobian_singular_values(torch.nn.Linear(3, 2), torch.randn(4, 3)).shape
        torch.Size([4, 2])
    """
    if inputs.dim() < 2 or not inputs.numel():
        raise ValueError(f"inputs: expected shape [N, ...] without a 0, got {list(inputs.shape)}")
    if not inputs.is_floating_point():
        raise ValueError(f"inputs: expected a floating-point dtype, got {inputs.dtype}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")

    def of_one(x: Tensor) -> Tensor:
        return layer(x.unsqueeze(0)).flatten()

    size = inputs[0].numel()
    with torch.no_grad():  # parameters are constants; torch.func still differentiates by inputs
        if chunk_size is None:
            outputs = of_one(inputs[0]).numel()
            chunk_size = max(1, _CHUNK_BYTES // (outputs * size * inputs.element_size()))
        jacobian = torch.func.vmap(torch.func.jacrev(of_one))
        return torch.cat(
            [
                torch.linalg.svdvals(jacobian(part).reshape(len(part), -1, size))
                for part in torch.split(inputs, chunk_size)
            ]
        )


@dataclass(frozen=True)
class Spectrum:
    """Singular values of many Jacobians of one kind, n values each, largest first.

    ``mean``, ``deviation``: of the i-th singular value. ``normalised``: mean of the i-th value
    divided by the largest of the same Jacobian. ``shares``: for each of :data:`THRESHOLDS`, the
    mean share of values above this multiple of the largest. ``rank``: mean number of values above n
    eps times the largest (eps of the dtype). ``condition``: quartiles and median of the ratio of
    largest to smallest value, infinite below full rank.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    normalised: tuple[float, ...]
    shares: tuple[float, ...]
    rank: float
    condition: tuple[float, float, float]


def summarize_singular_values(values: Tensor) -> Spectrum:
    """The ``Spectrum`` of singular values [N, n] of :func:`jacobian_singular_values`."""
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"values: expected shape [N, n] without a 0, got {list(values.shape)}")
    n = values.shape[1]
    normalised = values / values[:, :1].clamp_min(torch.finfo(values.dtype).tiny)
    regular = normalised > n * torch.finfo(values.dtype).eps
    condition = torch.where(regular.all(1), 1 / normalised[:, -1], torch.inf)
    # No interpolation, which could average a number and infinity.
    quartiles = np.quantile(condition.cpu().numpy(), (0.25, 0.5, 0.75), method="inverted_cdf")
    low, median, high = map(float, quartiles)
    return Spectrum(
        tuple(values.mean(0).tolist()),
        tuple(values.std(0, correction=min(1, len(values) - 1)).tolist()),
        tuple(normalised.mean(0).tolist()),
        tuple((normalised > share).double().mean().item() for share in THRESHOLDS),
        regular.sum(1).double().mean().item(),
        (low, median, high),
    )


@dataclass(frozen=True)
class LayerSpectrum:
    """The spectrum of one kind of layer. ``kind``: "linear", "dense" or "mixture"; ``gate`` and
    ``experts`` are None except for mixtures."""

    kind: str
    gate: str | None
    experts: int | None
    parameters: int
    spectrum: Spectrum


def jacobian_experiment(
    features: int = 128,
    inputs: int = 250,
    experts: Sequence[int] = (2, 4, 8, 16, 32),
    activation: str = "relu",
    gates: Sequence[str] = ("softmax", "constant"),
    seeds: int = 5,
    device: torch.device | str = "cpu",
) -> list[LayerSpectrum]:
    """Compute Jacobian spectra of untrained layers of n features: linear, dense f(W x + c), and for
    each gate and number of experts, in increasing order, a mixture sum_k g_k(x) f(W_k x + c_k).

    Weights are Glorot uniform, biases 0, inputs standard normal, all in float64. Each seed draws
    the inputs, the same for all layers, and the weights of every layer. The numbers are the same on
    every device.

    Args:
        features: number of features, n.
        inputs: number of inputs of each seed.
        experts: numbers of experts, K.
        activation: activation f, a name of :data:`hstree.lab.layers.ACTIVATIONS`.
        gates: names of :data:`hstree.lab.layers.GATES`; see :class:`hstree.lab.layers.MoEDense`.
        seeds: number of draws, seeds 0, 1, ...
        device: device of the computation. In addition to inputs and parameters, it needs at most
            about 512 MiB or 32 n^2 K bytes, whichever is more.

    Raises:
        ValueError: a number is below 1, a name is unknown, or a list is empty or has repetitions.
    """
    counts = [("features", features), ("inputs", inputs), ("seeds", seeds)]
    for name, value in (*counts, *(("experts", k) for k in experts)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for name, listed in (("experts", experts), ("gates", gates)):
        if not listed or len(set(listed)) < len(listed):
            raise ValueError(f"{name}: expected at least one, each once, got {list(listed)}")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation: expected one of {known}, got {activation!r}")
    for gate in gates:
        if gate not in GATES:
            raise ValueError(f"gates: expected some of {', '.join(GATES)}, got {gate!r}")

    kinds: list[tuple[str, str | None, int | None]]
    kinds = [("linear", None, None), ("dense", None, None)]
    kinds += [("mixture", gate, k) for gate in gates for k in sorted(experts)]
    layers = []
    for kind, of_gate, k in kinds:
        # Memory: gradients of every expert's output for each output, a few tensors at a time.
        chunk_size = max(1, _CHUNK_BYTES // (features * (k or 1) * features * 8))
        values = []
        for seed in track(range(seeds), f"{kind} layer", seeds):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                x = torch.randn(inputs, features, dtype=torch.float64)
                layer = MoEDense(
                    features,
                    features,
                    k or 1,
                    gate=of_gate or "none",
                    activation="identity" if kind == "linear" else activation,
                    dtype=torch.float64,
                ).to(device)
            found = jacobian_singular_values(layer, x.to(device), chunk_size=chunk_size)
            values.append(found.cpu())
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        spectrum = summarize_singular_values(torch.cat(values))
        layers.append(LayerSpectrum(kind, of_gate, k, parameters, spectrum))
    return layers
