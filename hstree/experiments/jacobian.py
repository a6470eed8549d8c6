"""How well conditioned layers are: singular values of their Jacobians dy/dx."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hstree.analysis import Table, table
from hstree.analysis.table import count, decimals
from hstree.layers import ACTIVATIONS, GATES, MoEDense

THRESHOLDS = (0.1, 0.01, 0.001)
"""Shares of the largest singular value above which singular values are counted."""

_CHUNK_BYTES = 2**27


def jacobian_singular_values(
    layer: Callable[[Tensor], Tensor], inputs: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """Singular values of dy/dx at each input, largest first.

    Equivalent, input by input, to

        jacobian = torch.func.jacrev(lambda x: layer(x[None])[0])(x)
        torch.linalg.svdvals(jacobian.reshape(y.numel(), x.numel()))

    Args:
        layer: any module or function of inputs [N, ...] that treats each by itself, so in eval
            mode where there is batch normalisation; torch.func must be able to transform it.
        inputs: x [N, ...], floating point.
        chunk_size: number of inputs whose Jacobians are held at a time, each the elements of y
            times those of x, and as many gradients of every tensor inside the layer; None: as many
            as have Jacobians of 128 MiB together.

    Returns:
        [N, min(elements of y, elements of x)], in the dtype of the Jacobian.

    Raises:
        ValueError: the inputs are no batch of at least one element each, are not floating point, or
            the chunk size is below 1.
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
    with torch.no_grad():  # parameters are constants; torch.func differentiates all the same
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

    ``mean``, ``deviation``: of the i-th singular value; ``normalised``: mean of the i-th divided by
    the largest of the same Jacobian. ``shares``: for each of :data:`THRESHOLDS`, the mean share of
    the n values that are above this times the largest. ``rank``: mean number of values above
    n eps times the largest (eps of the dtype). ``condition``: quartiles and median of the largest
    over the smallest, infinite below full rank.
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    normalised: tuple[float, ...]
    shares: tuple[float, ...]
    rank: float
    condition: tuple[float, float, float]


def summarize_singular_values(values: Tensor) -> Spectrum:
    """The :class:`Spectrum` of singular values [N, n] of :func:`jacobian_singular_values`."""
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"values: expected shape [N, n] without a 0, got {list(values.shape)}")
    n = values.shape[1]
    largest = values[:, :1]
    normalised = values / largest.clamp_min(torch.finfo(values.dtype).tiny)
    regular = normalised > n * torch.finfo(values.dtype).eps
    condition = torch.where(regular.all(1), 1 / normalised[:, -1], torch.inf)
    # No interpolation, which could take the mean of a number and infinity.
    quartiles = np.quantile(condition.cpu().numpy(), (0.25, 0.5, 0.75), method="inverted_cdf")
    return Spectrum(
        mean=tuple(values.mean(0).tolist()),
        deviation=tuple(values.std(0, correction=min(1, len(values) - 1)).tolist()),
        normalised=tuple(normalised.mean(0).tolist()),
        shares=tuple((normalised > share).double().mean().item() for share in THRESHOLDS),
        rank=regular.sum(1).double().mean().item(),
        condition=(float(quartiles[0]), float(quartiles[1]), float(quartiles[2])),
    )


@dataclass(frozen=True)
class LayerSpectrum:
    """The spectrum of one kind of layer: ``gate`` and ``experts`` are None for ``kind`` "linear"
    and "dense", else "mixture"."""

    kind: str
    gate: str | None
    experts: int | None
    parameters: int
    spectrum: Spectrum

    @property
    def label(self) -> str:
        """A few words for tables."""
        return self.kind if self.gate is None else f"mixture, {self.gate} gates"


@dataclass(frozen=True)
class JacobianExperiment:
    """Settings and what was found: linear, dense, then a mixture for each gate and number of
    experts."""

    features: int
    inputs: int
    experts: tuple[int, ...]
    activation: str
    gates: tuple[str, ...]
    seeds: int
    layers: tuple[LayerSpectrum, ...]

    def of_gate(self, gate: str) -> Iterator[LayerSpectrum]:
        """The mixtures with this gate, by number of experts."""
        return (layer for layer in self.layers if layer.gate == gate)


def jacobian_experiment(
    features: int = 128,
    inputs: int = 250,
    experts: Sequence[int] = (2, 4, 8, 16, 32),
    activation: str = "relu",
    gates: Sequence[str] = ("softmax", "constant"),
    seeds: int = 5,
    device: torch.device | str = "cpu",
) -> JacobianExperiment:
    """Jacobian spectra of untrained layers of n features: linear, dense f(W x + c), and mixtures
    of experts sum_k g_k(x) f(W_k x + c_k).

    Weights are Glorot uniform, biases 0, inputs standard normal, everything float64. Each seed
    draws inputs, the same for all layers, and the weights of every layer; the same numbers on every
    device.

    Args:
        features: n.
        inputs: inputs of each seed.
        experts: numbers of experts K.
        activation: f, a name of :data:`hstree.layers.ACTIVATIONS`.
        gates: of "softmax", "sigmoid", "constant", "none"; see :class:`hstree.layers.MoEDense`.
        seeds: number of draws, seeds 0, 1, ...
        device: where to compute. Beside inputs and parameters, memory stays below about 512 MiB or
            32 n^2 K bytes, whichever is more.

    Raises:
        ValueError: a number is below 1, a name is unknown, or something is listed twice or not at
            all.
    """
    experts, gates = tuple(sorted(experts)), tuple(gates)
    for name, value in (("features", features), ("inputs", inputs), ("seeds", seeds)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for name, given in (("experts", experts), ("gates", gates)):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{name}: expected at least one, each once, got {list(given)}")
    if experts[0] < 1:
        raise ValueError(f"experts: expected numbers of at least 1, got {experts[0]}")
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation: expected one of {known}, got {activation!r}")
    for gate in gates:
        if gate not in GATES:
            raise ValueError(f"gates: expected some of {', '.join(GATES)}, got {gate!r}")

    layers = [
        _measure("linear", None, None, "identity", features, inputs, seeds, device),
        _measure("dense", None, None, activation, features, inputs, seeds, device),
    ]
    for gate in gates:
        for k in experts:
            layers.append(_measure("mixture", gate, k, activation, features, inputs, seeds, device))
    return JacobianExperiment(features, inputs, experts, activation, gates, seeds, tuple(layers))


def _measure(
    kind: str,
    gate: str | None,
    experts: int | None,
    activation: str,
    features: int,
    inputs: int,
    seeds: int,
    device: torch.device | str,
) -> LayerSpectrum:
    k = experts or 1
    # A gradient of every expert's output for each output, in a few tensors at a time.
    chunk_size = max(1, _CHUNK_BYTES // (features * k * features * 8))
    values = []
    for seed in range(seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            x = torch.randn(inputs, features, dtype=torch.float64)
            layer = MoEDense(
                features,
                features,
                k,
                gate=gate or "none",
                activation=activation,
                dtype=torch.float64,
            )
        layer.to(device)
        values.append(jacobian_singular_values(layer, x.to(device), chunk_size=chunk_size).cpu())
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return LayerSpectrum(
        kind, gate, experts, parameters, summarize_singular_values(torch.cat(values))
    )


def jacobian_table(experiment: JacobianExperiment) -> Table:
    """A row for each layer."""
    spectra = [layer.spectrum for layer in experiment.layers]
    columns: list[tuple[str, bool, list[str]]] = [
        ("layer", False, [layer.label for layer in experiment.layers]),
        ("experts", True, [count(layer.experts) for layer in experiment.layers]),
        ("parameters", True, [count(layer.parameters) for layer in experiment.layers]),
        ("largest", True, [decimals(s.mean[0], 3) for s in spectra]),
        ("smallest", True, [_digits(s.mean[-1]) for s in spectra]),
        ("zero", True, [_percent(1 - s.rank / len(s.mean)) for s in spectra]),
    ]
    for place, share in enumerate(THRESHOLDS):
        name = f"above {share:g} of largest"
        columns.append((name, True, [_percent(s.shares[place]) for s in spectra]))
    columns += [
        ("median condition number", True, [_condition(s.condition[1]) for s in spectra]),
        (
            "quartiles",
            True,
            [f"{_condition(s.condition[0])} to {_condition(s.condition[2])}" for s in spectra],
        ),
    ]
    title = (
        f"Singular values of dy/dx, n = {experiment.features}, activation {experiment.activation}"
    )
    return table(title, columns)


def jacobian_notes(experiment: JacobianExperiment) -> list[str]:
    """What a reader must know beside the table."""
    return [
        f"Draws of inputs and weights: {experiment.seeds}; standard normal inputs of each: "
        f"{experiment.inputs}; Glorot uniform weights, biases 0, float64.",
        "largest, smallest: mean singular values; zero, above: mean share of the "
        f"{experiment.features} singular values that are at most n eps, or more than this, times "
        "the largest of the same Jacobian.",
        "Condition number: largest over smallest singular value, infinite (inf) if any is zero.",
    ]


def jacobian_rows(experiment: JacobianExperiment) -> list[dict[str, Any]]:
    """A row for each singular value of each layer, for CSV."""
    return [
        {
            "layer": layer.kind,
            "gate": layer.gate,
            "experts": layer.experts,
            "index": index,
            "mean": mean,
            "deviation": deviation,
            "normalised": normalised,
        }
        for layer in experiment.layers
        for index, (mean, deviation, normalised) in enumerate(
            zip(
                layer.spectrum.mean,
                layer.spectrum.deviation,
                layer.spectrum.normalised,
                strict=True,
            ),
            start=1,
        )
    ]


def _digits(value: float) -> str:
    """0 below what rounding leaves of a singular value that is zero."""
    return "0" if value < 1e-14 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _condition(value: float) -> str:
    return decimals(value, 0) if value < 1e6 else f"{value:.1e}" if value < float("inf") else "inf"
