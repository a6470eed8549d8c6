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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._progress import track
from hstree.lm.cli import Argument
from hstree.lm.report import COLOURS, count, legend, line_style, panels

from .layers import ACTIVATIONS, GATES, MoEDense
from .report import Measurement, Report, record_table

Array = npt.NDArray[np.float64]
THRESHOLDS = (0.1, 0.01, 0.001)
"""Thresholds for counting singular values, as shares of the largest."""

_CHUNK_BYTES = 2**27


def jacobian_singular_values(
    layer: Callable[[Tensor], Tensor], inputs: Tensor, *, chunk_size: int | None = None
) -> Tensor:
    """Singular values of dy/dx at each input, [N, n], largest first.

    Equivalent, input by input, to

        jacobian = torch.func.jacrev(lambda x: layer(x[None])[0])(x)
        torch.linalg.svdvals(jacobian.reshape(y.numel(), x.numel()))

    Args:
        layer: module or function of inputs [N, ...] that treats each input independently (in eval
            mode if there is batch normalization), and that torch.func can transform.
        inputs: inputs x, [N, ...], floating point.
        chunk_size: number of inputs whose Jacobians are in memory at a time, besides the layer's
            intermediate gradients; None: as many as fit in 128 MiB.

    Example:
        >>> import torch
        >>> from hstree.lab import jacobian_singular_values
        >>> jacobian_singular_values(torch.nn.Linear(3, 2), torch.randn(4, 3)).shape
        torch.Size([4, 2])
    """
    if inputs.dim() < 2 or not inputs.numel():
        raise ValueError(f"inputs: expected shape [N, ...] without a 0, got {list(inputs.shape)}")

    def of_one(x: Tensor) -> Tensor:
        return layer(x.unsqueeze(0)).flatten()

    size = inputs[0].numel()
    with torch.no_grad():  # parameters are constants; torch.func still differentiates by inputs
        if chunk_size is None:
            outputs = of_one(inputs[0]).numel()
            chunk_size = max(1, _CHUNK_BYTES // (outputs * size * inputs.element_size()))
        jacobian = torch.func.vmap(torch.func.jacrev(of_one))
        parts = (
            jacobian(part).reshape(len(part), -1, size) for part in torch.split(inputs, chunk_size)
        )
        return torch.cat([torch.linalg.svdvals(part) for part in parts])


class LayerSpectrum(NamedTuple):
    """The singular values of many Jacobians of one kind of layer, n each, largest first."""

    gate: str | None  # of a mixture
    record: dict[str, Any]  # its row of the table, see :func:`summarize_singular_values`
    mean: Array  # of the i-th value, [n]
    normalised: Array  # mean of the i-th value / the largest of the same Jacobian, [n]


def summarize_singular_values(values: Tensor) -> tuple[dict[str, Any], Array, Array]:
    """Summarize singular values [N, n] of :func:`jacobian_singular_values`.

    Returns:
        A record of the largest and smallest mean value; mean shares of values that are zero, at
        most n eps times the largest of the same Jacobian, or above :data:`THRESHOLDS` times it;
        and the quartiles of the condition number, largest / smallest, infinite if any is zero.
        The means of the i-th values, and those of normalised values.
    """
    n = values.shape[1]
    normalised = values / values[:, :1].clamp_min(torch.finfo(values.dtype).tiny)
    regular = normalised > n * torch.finfo(values.dtype).eps
    condition = torch.where(regular.all(1), 1 / normalised[:, -1], torch.inf)
    # No interpolation, which could average a number and infinity.
    quartiles = np.quantile(condition.numpy(), (0.25, 0.5, 0.75), method="inverted_cdf")
    mean: Array = values.mean(0).numpy()
    record: dict[str, Any] = {"largest": float(mean[0])}
    record["smallest"] = float(mean[-1] if mean[-1] >= 1e-14 else 0)
    record["zero"] = 1 - float(regular.sum(1).double().mean()) / n
    for share in THRESHOLDS:
        record[f"above {share:g} of largest"] = float((normalised > share).double().mean())
    low, median, high = map(float, quartiles)
    record |= {"median condition number": median, "quartiles": (low, high)}
    return record, mean, normalised.mean(0).numpy()


def jacobian_experiment(
    features: int = 128,
    inputs: int = 250,
    experts: Sequence[int] = (2, 4, 8, 16, 32),
    activation: str = "relu",
    gates: Sequence[str] = ("softmax", "constant"),
    seeds: int = 5,
) -> list[LayerSpectrum]:
    """Compute Jacobian spectra of untrained layers of n features: linear, dense f(W x + c), and for
    each gate and number of experts, in increasing order, a mixture sum_k g_k(x) f(W_k x + c_k).

    Weights are Glorot uniform, biases 0, the ``inputs`` of each seed 0, 1, ... standard normal, all
    in float64. Each seed draws the inputs, the same for all layers, and the weights of every layer.
    ``activation`` and ``gates`` are names of :mod:`hstree.lab.layers`.
    """
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
                f = "identity" if kind == "linear" else activation
                options: Any = {"gate": of_gate or "none", "activation": f, "dtype": torch.float64}
                layer = MoEDense(features, features, k or 1, **options)
            values.append(jacobian_singular_values(layer, x, chunk_size=chunk_size))
        record, *spectra = summarize_singular_values(torch.cat(values))
        about = {"layer": f"{kind}, {of_gate} gates" if of_gate else kind, "experts": k}
        about["parameters"] = sum(parameter.numel() for parameter in layer.parameters())
        layers.append(LayerSpectrum(of_gate, about | record, *spectra))
    return layers


def measure(arguments: argparse.Namespace) -> Report:
    names = ("features", "inputs", "experts", "activation", "gates", "seeds")
    settings = {name: getattr(arguments, name) for name in names}
    for name in ("experts", "gates"):
        if len(set(settings[name])) < len(settings[name]):
            raise ValueError(f"--{name}: expected each once, got {settings[name]}")
    settings["experts"].sort()
    layers = jacobian_experiment(**settings)
    activation = arguments.activation
    notes = [
        f"Draws of inputs and weights: {arguments.seeds}; standard normal inputs of each: "
        f"{arguments.inputs}; Glorot uniform weights, biases 0, float64.",
        "largest, smallest: mean singular values; zero, above: mean share of the "
        f"{arguments.features} singular values that are at most n eps, or more than this, "
        "times the largest of the same Jacobian.",
        "Condition number: largest over smallest singular value, infinite (inf) if any is zero.",
    ]
    forms: dict[str, Any] = {"parameters": count, "median condition number": _condition}
    forms |= {"quartiles": lambda of: " to ".join(map(_condition, of))}
    forms |= {"largest": ".3f", "smallest": _digits, "zero": ".1%"}
    forms |= {f"above {share:g} of largest": ".1%" for share in THRESHOLDS}
    title = f"Singular values of dy/dx, n = {arguments.features}, activation {activation}"
    table = record_table(title, [layer.record for layer in layers], forms)
    spectra = {name: [getattr(layer, name) for layer in layers] for name in ("mean", "normalised")}
    pictures = {
        "normalised-singular-values": jacobian_picture(layers, activation, normalised=True),
        "singular-values": jacobian_picture(layers, activation, normalised=False),
    }
    title = "Jacobians of mixtures of experts"
    return Report(title, [table], notes, settings | spectra, pictures)


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
    experts = dict.fromkeys(of.record["experts"] for of in layers if of.gate)
    styles: dict[object, dict[str, Any]] = {
        k: line_style(number) | {"lw": 1.4, "label": f"mixture, K = {k}"}
        for number, k in enumerate(experts)
    }
    styles["linear"] = {"linestyle": ":", "lw": 1.6, "label": "linear, no activation"}
    styles["dense"] = {"lw": 2.2, "label": f"dense, {activation}"}
    values = [layer.normalised if normalised else layer.mean for layer in layers]
    largest = max(map(max, values))
    name = "mean singular value / largest" if normalised else "mean singular value of dy/dx"
    shared: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    figure, grid = panels(1.6 + 3.4 * len(gates), 6.8, 2, len(gates), **shared)
    for gate, (top, bottom) in zip(gates, grid.T, strict=True):
        for axes in (top, bottom):
            for layer, heights in zip(layers, values, strict=True):
                if layer.gate in (None, gate):
                    kind = layer.record["experts"] or layer.record["layer"]
                    style = {"color": COLOURS[-1]} | styles[kind]
                    axes.plot(range(1, len(heights) + 1), heights, **style)
        top.set_title(f"{gate} gates", fontsize=10)
        top.set_ylim(0, 1.05 * largest)
        bottom.set(yscale="log", ylim=(_FLOOR * largest, 1.5 * largest))
        bottom.set_xlabel("index of the singular value")
    grid[0, 0].set_ylabel(name)
    grid[1, 0].set_ylabel(f"{name} (log scale)")
    legend(figure, *grid[0, 0].get_legend_handles_labels(), loc="lower center", ncols=4)
    return figure


_NAMES, _GATES = tuple(ACTIVATIONS), "gates of the mixtures; constant: 1 / K, none: 1"
COMMAND = Measurement(
    "jacobian",
    "how well conditioned mixtures of experts are",
    measure,
    (
        Argument("--features", "number of inputs and outputs of the layers", 128),
        Argument("--inputs", "number of inputs of a draw", 250),
        Argument("--experts", "numbers of experts", [2, 4, 8, 16, 32], metavar="K"),
        Argument("--activation", "of the dense layer and of experts", "relu", choices=_NAMES),
        Argument("--gates", _GATES, ["softmax", "constant"], choices=GATES),
        Argument("--seeds", "number of draws of inputs and weights", 5),
    ),
)
