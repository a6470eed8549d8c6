"""A picture of the top levels of a tree."""

from __future__ import annotations

import os
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy.typing as npt

from hstree._files import write_atomic
from hstree.lm._packages import optional_package
from hstree.lm._pictures import new_figure, picture
from hstree.trees import Tree
from hstree.trees.describe import Item, outline


def draw_tree(
    tree: Tree,
    words: Sequence[str] | None,
    path: str | os.PathLike[str],
    levels: int = 4,
    frequencies: npt.ArrayLike | None = None,
) -> None:
    """Draw what :func:`hstree.trees.describe` tells of a tree to a PNG file, which is replaced
    atomically. Its arguments and errors, and ValueError without matplotlib."""
    optional_package("matplotlib", "a picture", "lm")
    root = outline(tree, frequencies, words, min(levels, 10))
    figure = new_figure(1, 1, constrained=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")

    def place(item: Item, left: float, top: float) -> tuple[float, float]:
        """Draws a node and those below it; returns its row and the next free one."""
        ends, bottom = [], top + (not item.children)
        for child in item.children:
            end, bottom = place(child, left + 2.2, bottom)
            ends.append(end)
        row = (ends[0] + ends[-1]) / 2 if ends else top
        for child, end in zip(item.children, ends, strict=True):
            line = [left + 0.9, left + 2, left + 2.2], [row, end, end]
            axes.plot(*line, color="#b5c2cf", linewidth=0.6 + 5 * child.share**0.5, zorder=1)
        text = f"{100 * item.share:.3g}%  {item.text}"
        text = textwrap.fill(text, 26, break_long_words=False) if ends else text
        box = {"boxstyle": "round", "facecolor": "#e6eef7" if ends else "#fdf3e1", "linewidth": 0}
        axes.text(left, row, text, fontsize=8, va="center", parse_math=False, bbox=box)
        return row, bottom

    _, rows = place(root, 0, 0)
    right = 4 + max(text.get_position()[0] for text in axes.texts)
    figure.set_size_inches(right, 0.4 * rows)
    axes.set(xlim=(0, right), ylim=(rows, -1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack a character
        write_atomic(Path(path), picture(figure, dpi=150, bbox_inches="tight"))
