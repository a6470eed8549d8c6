"""A picture of the top levels of a tree."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from hstree._files import write_atomic
from hstree.lm._packages import optional_package
from hstree.lm._pictures import new_figure, picture
from hstree.trees import Tree
from hstree.trees.describe import Item, Outline, count_of, percent

_ROWS = 32  # most rows of a picture
_LEVELS = 10  # most levels below the root of a picture
_CHILDREN = 20  # children of a node that a picture shows
_INNER_CHARACTERS = 22  # width of a node that has children, in characters
_OUTER_CHARACTERS = 64  # width of a node that has none


def draw_tree(
    tree: Tree,
    words: Sequence[str] | None,
    path: str | os.PathLike[str],
    levels: int = 4,
    frequencies: npt.ArrayLike | None = None,
) -> None:
    """Draw the top levels of a tree to a PNG file, each node with its mass and frequent words.

    The root is at the left. Only the heaviest children of a wide node are shown. Nodes are unfolded
    level by level, heaviest first, until the picture has 32 rows.

    Args:
        tree: the tree.
        words: names of the V classes; None: their numbers.
        path: PNG file to write; an existing file is replaced atomically.
        levels: number of levels below the root to show, at least 1; at most 10 are shown.
        frequencies: class frequencies, real [V], finite, none negative; None (or all zero): every
            class counts once.

    Raises:
        TypeError: if the frequencies are not real numbers.
        ValueError: if matplotlib is not installed, for a wrong number of words or frequencies, or
            ``levels`` below 1.

    Example:
        >>> import hstree
        >>> from hstree.lm import draw_tree
        >>> counts = range(100, 0, -1)
        >>> tree = hstree.trees.huffman_tree(counts, root=8)
        >>> draw_tree(tree, None, "tree.png", frequencies=counts)
    """
    optional_package("matplotlib", "a picture", "lm")
    outline = Outline(tree, words, frequencies, levels)
    n_rows = _unfold_to_rows(outline)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack a character
        figure, area = _figure(outline, n_rows)
        write_atomic(Path(path), picture(figure, dpi=150, bbox_inches=area))


def _unfold_to_rows(outline: Outline) -> int:
    """Unfolds the outline level by level and returns its number of rows."""
    n_rows = 1
    level = [outline.root]
    for _ in range(min(outline.levels, _LEVELS)):
        following: list[Item] = []
        for item in sorted(level, key=lambda item: -item.share):
            if item.node < 0:
                continue
            n_children = int(outline.tree.n_children[item.node])
            width = n_children if n_children <= _CHILDREN else _CHILDREN + 1
            if item.level > 0 and n_rows + width - 1 > _ROWS:
                continue
            outline.unfold(item, _CHILDREN)
            n_rows += width - 1
            following += item.children
        level = following
    return n_rows


def _figure(outline: Outline, n_rows: int) -> tuple[Any, Any]:
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Curve
    from matplotlib.transforms import Bbox

    # Units are inches; `character` is the largest width of a character.
    character, row, gap, margin, title = 0.072, 0.4, 0.45, 0.25, 0.45
    inner_width = _INNER_CHARACTERS * character + 0.2
    outer_width = _OUTER_CHARACTERS * character + 0.9
    depth = _depth(outline.root)
    width = 2 * margin + depth * (inner_width + gap) + outer_width
    height = 2 * margin + title + n_rows * row
    figure = new_figure(width, height, constrained=False)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    ink, line, fill, leaf_fill = "#1b2733", "#7f93a8", "#e6eef7", "#fdf3e1"

    def write(x: float, y: float, text: str, **style: Any) -> None:
        axes.text(x, y, text, va="center_baseline", color=ink, parse_math=False, zorder=3, **style)

    def box(left: float, middle: float, width: float, height: float, color: str) -> None:
        rounded = f"round,pad=0,rounding_size={height / 5}"
        style: dict[str, Any] = {"facecolor": color, "edgecolor": line, "linewidth": 0.8}
        corner = (left, middle - height / 2)
        axes.add_patch(FancyBboxPatch(corner, width, height, boxstyle=rounded, zorder=2, **style))

    def place(item: Item, top: float) -> tuple[float, float]:
        """Draws a node and its subtree; returns the y-coordinates of its middle and its end."""
        left = margin + item.level * (inner_width + gap)
        if not item.children:
            middle, bottom = top + row / 2, top + row
            text = outline.label(item, _OUTER_CHARACTERS, "  ")
            share = percent(item.share)
            if item.n_hidden:
                write(left + 0.08, middle, f"{text}, {share}", fontsize=8.5, style="italic")
                return middle, bottom
            box(left, middle, 0.62, 0.3, leaf_fill if item.node < 0 else fill)
            write(left + 0.31, middle, share, fontsize=8.5, ha="center", weight="bold")
            write(left + 0.72, middle, text, fontsize=9)
            return middle, bottom
        ends = []
        bottom = top
        for child in item.children:
            child_middle, bottom = place(child, bottom)
            ends.append(child_middle)
        middle = (ends[0] + ends[-1]) / 2
        right, next_left = left + inner_width, left + inner_width + gap
        for child, end in zip(item.children, ends, strict=True):
            bend = (right + next_left) / 2
            curve = Curve(
                [(right, middle), (bend, middle), (bend, end), (next_left, end)],
                [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
            )
            width, dashes = (0.8, ":") if child.n_hidden else (0.6 + 5 * child.share**0.5, "-")
            style = {"facecolor": "none", "edgecolor": line, "alpha": 0.55, "capstyle": "butt"}
            axes.add_patch(PathPatch(curve, linewidth=width, linestyle=dashes, zorder=1, **style))
        box(left, middle, inner_width, 0.4, fill)
        count = f"{percent(item.share)} · {item.end - item.begin:,} classes"
        center = left + inner_width / 2
        write(center, middle - 0.085, count, fontsize=8.5, ha="center", weight="bold")
        words = outline.label(item, _INNER_CHARACTERS, "  ")
        write(center, middle + 0.095, words, fontsize=8.5, ha="center")
        return middle, bottom

    tree = outline.tree
    heading = (
        f"{count_of(tree.n_classes, 'class', 'es')}, {count_of(tree.n_nodes, 'inner node', 's')}"
    )
    if tree.root_width > 2:
        heading += f", root of {tree.root_width:,} children"
    write(margin, margin + 0.15, heading, fontsize=11, weight="bold")
    place(outline.root, margin + title)
    right = max(text.get_window_extent().x1 for text in axes.texts) / figure.dpi
    return figure, Bbox([[0, 0], [right + margin, height]])


def _depth(item: Item) -> int:
    return max((_depth(child) + 1 for child in item.children), default=0)
