"""``hstree experiment jacobian``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hstree.lab.layers import ACTIVATIONS, GATES
from hstree.lm._arguments import Argument
from hstree.lm._pictures import COLOURS, legend, line_style, panels
from hstree.lm.table import Table, count, decimals, table

from ..report import Report
from ..runner import Measurement
from .compute import THRESHOLDS, LayerSpectrum, jacobian_experiment

_SETTINGS = ("features", "inputs", "experts", "activation", "gates", "seeds")
_ROW = ("layer", "gate", "experts", "index", "mean", "deviation", "normalised")


def measure(arguments: argparse.Namespace) -> Report:
    settings = {name: getattr(arguments, name) for name in _SETTINGS}
    settings["experts"].sort()
    layers = jacobian_experiment(**settings, device=arguments.device)
    activation, rows = arguments.activation, []
    for layer in layers:
        of_layer = layer.spectrum.mean, layer.spectrum.deviation, layer.spectrum.normalised
        for index, values in enumerate(zip(*of_layer, strict=True), start=1):
            cells = (layer.kind, layer.gate, layer.experts, index, *values)
            rows.append(dict(zip(_ROW, cells, strict=True)))
    return Report(
        "Jacobians of mixtures of experts",
        [jacobian_table(layers, activation)],
        [
            f"Draws of inputs and weights: {arguments.seeds}; standard normal inputs of each: "
            f"{arguments.inputs}; Glorot uniform weights, biases 0, float64.",
            "largest, smallest: mean singular values; zero, above: mean share of the "
            f"{arguments.features} singular values that are at most n eps, or more than this, "
            "times the largest of the same Jacobian.",
            "Condition number: largest over smallest singular value, infinite (inf) if any is "
            "zero.",
        ],
        settings | {"layers": layers},
        rows,
        {
            "normalised-singular-values": jacobian_picture(layers, activation, normalised=True),
            "singular-values": jacobian_picture(layers, activation, normalised=False),
        },
    )


def jacobian_table(layers: Sequence[LayerSpectrum], activation: str) -> Table:
    n = len(layers[0].spectrum.mean)
    return table(
        f"Singular values of dy/dx, n = {n}, activation {activation}",
        layers,
        [
            ("layer", lambda layer: f"mixture, {layer.gate} gates" if layer.gate else layer.kind),
            ("experts", lambda layer: layer.experts, count),
            ("parameters", lambda layer: layer.parameters, count),
            ("largest", lambda layer: layer.spectrum.mean[0], decimals(3)),
            ("smallest", lambda layer: layer.spectrum.mean[-1], _digits),
            ("zero", lambda layer: 1 - layer.spectrum.rank / n, _percent),
            *(
                (f"above {share:g} of largest", partial(_share, place), _percent)
                for place, share in enumerate(THRESHOLDS)
            ),
            ("median condition number", lambda layer: layer.spectrum.condition[1], _condition),
            ("quartiles", lambda layer: layer.spectrum.condition[::2], _ends),
        ],
    )


def _digits(value: float) -> str:
    """The value, or 0 below the rounding error of a zero singular value."""
    return "0" if value < 1e-14 else f"{value:.1e}" if value < 0.001 else f"{value:.4f}"


def _share(place: int, layer: LayerSpectrum) -> float:
    return layer.spectrum.shares[place]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _condition(value: float) -> str:
    return f"{value:.1e}" if 1e6 <= value < math.inf else f"{value:,.0f}"


def _ends(values: tuple[float, float]) -> str:
    return " to ".join(map(_condition, values))


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
    """\
Singular values of dy/dx of untrained layers with Glorot uniform weights, at standard normal inputs:
a linear layer, a dense layer with an activation, and mixtures of experts y = sum_k g_k(x) f(W_k x +
c_k) in its place, for increasing numbers of experts. A layer is well conditioned, so that gradients
pass it well, if its singular values are of similar size.
""",
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
