"""Plots of the singular values of Jacobians."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hstree.lm._pictures import COLOURS, line_style, new_figure

from .compute import LayerSpectrum

_FLOOR = 1e-4  # lower limit of the logarithmic panels, as a share of the largest value


def jacobian_picture(layers: Sequence[LayerSpectrum], activation: str, *, normalised: bool) -> Any:
    """Plot mean singular values against their index: a column for each kind of gate, linear above,
    logarithmic below. Every panel includes the linear and the dense layer.

    Args:
        layers: result of :func:`jacobian_experiment`.
        activation: their activation.
        normalised: whether to divide by the largest value of the same Jacobian before the mean.
    """
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
    figure = new_figure(1.6 + 3.4 * len(gates), 6.8)
    grid = figure.subplots(2, len(gates), sharex=True, sharey="row", squeeze=False)
    for gate, (top, bottom) in zip(gates, grid.T, strict=True):
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
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
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=4)
    return figure
