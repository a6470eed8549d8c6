"""Pictures of the singular values of Jacobians."""

from __future__ import annotations

from hstree._figures import COLOURS, line_style, new_figure, picture

from .jacobian import JacobianExperiment, LayerSpectrum

_FLOOR = 1e-4  # of the logarithmic panels, times the largest value shown


def jacobian_picture(experiment: JacobianExperiment, *, normalised: bool) -> bytes:
    """Mean singular values against their index, as PNG: a column for each kind of gate, above
    linear, below logarithmic; linear and dense layer in all of them.

    Args:
        experiment: of :func:`jacobian_experiment`.
        normalised: divided by the largest of the same Jacobian before the mean, or as they are.
    """
    columns = len(experiment.gates)
    figure = new_figure(1.6 + 3.4 * columns, 6.8)
    grid = figure.subplots(2, columns, sharex=True, sharey="row", squeeze=False)
    reference = [layer for layer in experiment.layers if layer.gate is None]

    def values(layer: LayerSpectrum) -> tuple[float, ...]:
        return layer.spectrum.normalised if normalised else layer.spectrum.mean

    largest = max(max(values(layer)) for layer in experiment.layers)
    for column, gate in enumerate(experiment.gates):
        for axes in grid[:, column]:
            for layer in reference:
                dense = layer.kind == "dense"
                axes.plot(
                    range(1, experiment.features + 1),
                    values(layer),
                    color=COLOURS[-1],
                    linestyle="-" if dense else ":",
                    lw=2.2 if dense else 1.6,
                    label=f"dense, {experiment.activation}" if dense else "linear, no activation",
                )
            for layer in experiment.of_gate(gate):
                style = line_style(experiment.experts.index(layer.experts or 0))
                axes.plot(
                    range(1, experiment.features + 1),
                    values(layer),
                    **style,
                    lw=1.4,
                    label=f"mixture, K = {layer.experts}",
                )
            axes.grid(alpha=0.3)
        grid[0, column].set_title(f"{gate} gates", fontsize=10)
        grid[0, column].set_ylim(0, 1.05 * largest)
        grid[1, column].set_yscale("log")
        grid[1, column].set_ylim(_FLOOR * largest, 1.5 * largest)
        grid[1, column].set_xlabel("index of the singular value")
    name = "mean singular value / largest" if normalised else "mean singular value of dy/dx"
    grid[0, 0].set_ylabel(name)
    grid[1, 0].set_ylabel(f"{name} (log scale)")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=4)
    return picture(figure)
