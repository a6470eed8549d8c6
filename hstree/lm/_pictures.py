"""Figures without a display, in colors that color-blind readers can distinguish, as files."""

from __future__ import annotations

import io
import logging
from typing import Any

# Okabe and Ito, Color Universal Design (2008), without yellow, which is too faint on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
FORMATS = ("png", "pdf", "svg")


def new_figure(width: float, height: float, *, constrained: bool = True) -> Any:
    """A :class:`matplotlib.figure.Figure` of this size in inches, without a window."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # no message when it builds its cache
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained" if constrained else None)
    FigureCanvasAgg(figure)
    return figure


def panels(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    grid: str | None = "both",
    **style: Any,
) -> tuple[Any, Any]:
    """A figure of this size in inches and its axes, as :meth:`matplotlib.figure.Figure.subplots`
    returns them, with a grid along x, y, both or (None) neither. ``style``: its options."""
    figure = new_figure(width, height)
    every = figure.subplots(rows, columns, **style)
    for axes in figure.axes if grid else ():
        axes.grid(axis=grid, alpha=0.3)
    return figure, every


def legend(figure: Any, *of: Any, loc: str = "lower left", **style: Any) -> None:
    """A legend outside of the axes. ``of``: handles and labels, by default those of all axes."""
    figure.legend(*of, loc=f"outside {loc}", frameon=False, **{"fontsize": 8} | style)


def line_style(number: int) -> dict[str, str]:
    """Color and line style of curve ``number`` of a picture: all colors solid, then dashed, ..."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": LINES[number // len(COLOURS) % len(LINES)],
    }


def perplexity_axes(axes: Any) -> None:
    """Axes of perplexities, in a logarithmic scale, by epoch."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch (passes over the training text)")


def plain(text: str) -> str:
    """The text changed so that matplotlib shows it literally: a dollar would start a formula, and a
    leading underscore would hide a label."""
    return " " * text.startswith("_") + text.replace("$", r"\$")


def picture(figure: Any, file_format: str = "png", **options: Any) -> bytes:
    """A figure from :func:`new_figure` as the content of a file, in one of :data:`FORMATS`; raises
    ValueError for another. ``options``: further arguments of ``savefig``."""
    if file_format not in FORMATS:
        raise ValueError(f"file_format: expected one of {', '.join(FORMATS)}, got {file_format!r}")
    buffer = io.BytesIO()
    metadata = {"Software": "hstree"} if file_format == "png" else None
    figure.savefig(buffer, format=file_format, metadata=metadata, **options)
    return buffer.getvalue()
