"""Conditioning of layers: singular values of their Jacobians dy/dx.

A layer is well conditioned, so that gradients pass it well, if the singular values of its Jacobian
are of similar size. The experiment takes untrained layers of n features with Glorot uniform weights
at standard normal inputs: a linear layer, a dense layer f(W x + b), and in its place mixtures

    y = sum_k g_k(x) f(W_k x + c_k)

of K experts (Orhan). A dense ReLU layer has about n / 2 singular values of 0, one for each inactive
unit; a mixture loses a row only where all K experts are inactive, with probability 2^-K.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hstree._progress import track
from hstree.lm.cli import Argument
from hstree.lm.report import COLOURS, Table, count, legend, line_style, panels

from .layers import ACTIVATIONS, GATES, MoEDense
from .report import Measurement, Report, record_table

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
        chunk_size: number of inputs whose Jacobians are in memory at a time, besides the layer's
            intermediate gradients; None: as many as fit in 128 MiB.

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


class Spectrum(NamedTuple):
    """Singular values of many Jacobians of one kind, n values each, largest first."""

    mean: tuple[float, ...]  # of the i-th value
    deviation: tuple[float, ...]
    normalised: tuple[float, ...]  # mean of the i-th value / the largest of the same Jacobian
    shares: tuple[float, ...]  # mean shares of values above each of THRESHOLDS times the largest
    rank: float  # mean number of values above n eps times the largest
    condition: tuple[float, float, float]  # quartiles, median of largest / smallest; inf if it is 0


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
        device: device of the computation.

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
    known: list[Any] = [("gates", gate, GATES) for gate in gates]
    for name, given, names in (("activation", activation, ACTIVATIONS), *known):
        if given not in names:
            raise ValueError(f"{name}: expected one of {', '.join(names)}, got {given!r}")
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


def measure(arguments: argparse.Namespace) -> Report:
    names = ("features", "inputs", "experts", "activation", "gates", "seeds")
    settings = {name: getattr(arguments, name) for name in names}
    settings["experts"].sort()
    layers = jacobian_experiment(**settings, device=arguments.device)
    activation, keys = arguments.activation, ("index", "mean", "deviation", "normalised")
    rows = [
        {"layer": layer.kind, "gate": layer.gate, "experts": layer.experts}
        | dict(zip(keys, values, strict=True))
        for layer in layers
        for values in zip(range(1, arguments.features + 1), *layer.spectrum[:3], strict=True)
    ]
    notes = [
        f"Draws of inputs and weights: {arguments.seeds}; standard normal inputs of each: "
        f"{arguments.inputs}; Glorot uniform weights, biases 0, float64.",
        "largest, smallest: mean singular values; zero, above: mean share of the "
        f"{arguments.features} singular values that are at most n eps, or more than this, "
        "times the largest of the same Jacobian.",
        "Condition number: largest over smallest singular value, infinite (inf) if any is zero.",
    ]
    pictures = {
        "normalised-singular-values": jacobian_picture(layers, activation, normalised=True),
        "singular-values": jacobian_picture(layers, activation, normalised=False),
    }
    tables, title = [jacobian_table(layers, activation)], "Jacobians of mixtures of experts"
    return Report(title, tables, notes, settings | {"layers": layers}, rows, pictures)


def jacobian_table(layers: Sequence[LayerSpectrum], activation: str) -> Table:
    records = []
    n = len(layers[0].spectrum.mean)
    for layer in layers:
        spectrum, least = layer.spectrum, layer.spectrum.mean[-1]
        name = f"mixture, {layer.gate} gates" if layer.gate else layer.kind
        record: dict[str, Any] = {
            "layer": name,
            "experts": layer.experts,
            "parameters": layer.parameters,
        }
        record |= {"largest": spectrum.mean[0], "smallest": least if least >= 1e-14 else 0}
        record |= {"zero": 1 - spectrum.rank / n}
        shares = zip(THRESHOLDS, spectrum.shares, strict=True)
        record |= {f"above {share:g} of largest": of for share, of in shares}
        record["median condition number"] = spectrum.condition[1]
        records.append(
            record | {"quartiles": " to ".join(map(_condition, spectrum.condition[::2]))}
        )
    forms: dict[str, Any] = {"parameters": count, "median condition number": _condition}
    forms |= {"quartiles": str, "largest": ".3f", "smallest": _digits}
    forms |= {key: ".1%" for key in records[0] if key.startswith(("zero", "above"))}
    title = f"Singular values of dy/dx, n = {n}, activation {activation}"
    return record_table(title, records, forms)


def _digits(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def _condition(value: float) -> str:
    return f"{value:.1e}" if 1e6 <= value < math.inf else f"{value:,.0f}"


_FLOOR = 1e-4  # lower limit of the logarithmic panels, as a share of the largest value


def jacobian_picture(layers: Sequence[LayerSpectrum], activation: str, *, normalised: bool) -> Any:
    """Plot mean singular values against their index, ``normalised`` by the largest value of the
    same Jacobian before the mean: a column for each kind of gate, linear above, logarithmic below.
    Every panel includes the linear and the dense layer."""
    gates = list(dict.fromkeys(layer.gate for layer in layers if layer.gate))
    experts = dict.fromkeys(layer.experts for layer in layers if layer.experts)
    styles: dict[object, dict[str, Any]] = {
        k: line_style(number) | {"lw": 1.4, "label": f"mixture, K = {k}"}
        for number, k in enumerate(experts)
    }
    styles["linear"] = {"linestyle": ":", "lw": 1.6, "label": "linear, no activation"}
    styles["dense"] = {"lw": 2.2, "label": f"dense, {activation}"}
    values = [layer.spectrum.normalised if normalised else layer.spectrum.mean for layer in layers]
    largest = max(map(max, values))
    name = "mean singular value / largest" if normalised else "mean singular value of dy/dx"
    shared: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, grid = panels(1.6 + 3.4 * len(gates), 6.8, 2, len(gates), **shared)
    for gate, (top, bottom) in zip(gates, grid.T, strict=True):
        for axes in (top, bottom):
            for layer, heights in zip(layers, values, strict=True):
                if layer.gate in (None, gate):
                    style = {"color": COLOURS[-1]} | styles[layer.experts or layer.kind]
                    axes.plot(range(1, len(heights) + 1), heights, **style)
        top.set_title(f"{gate} gates", fontsize=10)
        top.set_ylim(0, 1.05 * largest)
        bottom.set(yscale="log", ylim=(_FLOOR * largest, 1.5 * largest))
        bottom.set_xlabel("index of the singular value")
    grid[0, 0].set_ylabel(name)
    grid[1, 0].set_ylabel(f"{name} (log scale)")
    legend(figure, *grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4)
    return figure


COMMAND = Measurement(
    "jacobian",
    "how well conditioned mixtures of experts are",
    measure,
    (
        Argument("--features", "number of inputs and outputs of the layers", 128),
        Argument("--inputs", "number of inputs of a draw", 250),
        Argument("--experts", "numbers of experts", [2, 4, 8, 16, 32], metavar="K"),
        Argument(
            "--activation",
            "activation of the dense layer and of every expert",
            "relu",
            choices=tuple(ACTIVATIONS),
        ),
        Argument(
            "--gates",
            "gates of the mixtures; constant: 1 / K, none: 1",
            ["softmax", "constant"],
            choices=GATES,
        ),
        Argument("--seeds", "number of draws of inputs and weights", 5),
    ),
    settings=("device",),
)
