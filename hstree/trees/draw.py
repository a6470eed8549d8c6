"""The top levels of a tree as text and as a picture."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree._checks import check_frequencies, check_int
from hstree._files import write_atomic
from hstree._pictures import new_figure
from hstree.trees.tree import Tree

_TEXT_CHILDREN = 6  # children of a node that `describe` shows
_ROWS = 32  # most rows of a picture
_LEVELS = 10  # most levels below the root of a picture
_CHILDREN = 20  # children of a node that a picture shows
_INNER_CHARACTERS = 22  # width of a node that has children, in characters
_OUTER_CHARACTERS = 64  # width of a node that has none


@dataclass
class _Item:
    """A node of the outline, or the rest of its siblings (``n_hidden`` > 0)."""

    node: int  # inner node, -1 for a leaf
    begin: int
    end: int
    share: float  # of the whole mass
    level: int
    children: list[_Item] = field(default_factory=list)
    n_hidden: int = 0


class _Outline:
    """The top levels of a tree with masses and words."""

    def __init__(
        self,
        tree: Tree,
        words: Sequence[str] | None,
        frequencies: npt.ArrayLike | None,
        levels: int,
    ) -> None:
        if words is not None and len(words) != tree.n_classes:
            raise ValueError(f"words: expected {tree.n_classes} words, got {len(words)}")
        self.tree = tree
        self.words = words
        self.levels = check_int("levels", levels, 1)
        weight = np.ones(tree.n_classes)
        if frequencies is not None:
            weight = check_frequencies(frequencies, tree.n_classes)
            if not weight.any():
                weight = np.ones(tree.n_classes)
        self.weight = weight / weight.sum()
        self.share = tree.edge_masses(self.weight)
        root = 0 if tree.n_nodes else -1
        self.root = _Item(root, 0, tree.n_classes, 1.0, 0)

    def unfold(self, item: _Item, most: int) -> None:
        """Adds the children of a node.

        If there are more than ``most``, adds only the heaviest single classes and the heaviest
        inner nodes, half of each if there are enough.
        """
        tree, edges = self.tree, self.tree.edges()
        first = int(tree.node_offset[item.node]) - item.node
        last = int(tree.node_offset[item.node + 1]) - item.node - 1
        shown = np.arange(first, last)
        if len(shown) > most:
            shown = shown[np.lexsort((shown, -self.share[shown]))]
            inner = edges.child_node[shown] >= 0
            n_inner = min(most // 2, int(inner.sum()))
            n_single = min(most - n_inner, int((~inner).sum()))
            chosen = [shown[~inner][:n_single], shown[inner][: most - n_single]]
            shown = np.concatenate(chosen)
        item.children = [
            _Item(
                int(edges.child_node[e]),
                int(edges.begin[e]),
                int(edges.end[e]),
                float(self.share[e]),
                item.level + 1,
            )
            for e in shown
        ]
        n_hidden = last - first - len(shown)
        if n_hidden:
            share = max(0.0, item.share - sum(child.share for child in item.children))
            item.children.append(
                _Item(-1, item.begin, item.end, share, item.level + 1, n_hidden=n_hidden)
            )

    def label(self, item: _Item, width: int, separator: str) -> str:
        """The most frequent words of a node, as many as fit into ``width`` characters."""
        if item.n_hidden:
            return f"… {item.n_hidden:,} more"
        classes = self.tree.order[item.begin : item.end]
        n_shown = min(len(classes), width)
        top = classes
        if n_shown < len(classes):
            weight = self.weight[classes]
            top = classes[weight >= np.partition(weight, -n_shown)[-n_shown]]
        top = top[np.lexsort((top, -self.weight[top]))][:n_shown]
        text = ""
        for rank, c in enumerate(top.tolist()):
            word = f"class {c}" if self.words is None else _printable(self.words[c])
            longer = text + (separator if text else "") + word
            room = width - (2 if rank + 1 < len(classes) else 0)
            if len(longer) > room:
                return f"{text} …" if text else word[: max(1, width - 1)] + "…"
            text = longer
        return text


def _printable(word: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in word) or "''"


def _count(n: int, noun: str, plural: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else plural)


def _percent(share: float) -> str:
    digits = 1 if share >= 0.0995 else 2 if share >= 0.00995 else 3
    return f"{100 * share:.{digits}f}%"


def describe(
    tree: Tree,
    frequencies: npt.ArrayLike | None = None,
    words: Sequence[str] | None = None,
    levels: int = 3,
) -> str:
    """Describe a tree as text: size, depth, and the top levels with their masses and frequent
    words.

    Args:
        tree: the tree.
        frequencies: class frequencies, real [V], finite, none negative; None (or all zero): every
            class counts once.
        words: names of the V classes; None: their numbers.
        levels: number of levels below the root to show, at least 1.

    Raises:
        TypeError: if the frequencies are not real numbers.
        ValueError: for a wrong number of words or frequencies, or ``levels`` below 1.

    Example:
        >>> import hstree
        >>> tree = hstree.trees.huffman_tree([5, 3, 2])
        >>> print(hstree.trees.describe(tree, words=["the", "of", "cat"]))
        3 classes under 2 inner nodes (2 binary), 1 to 2 on a path
        inner nodes visited: 1.67 on average over the classes
        <BLANKLINE>
        100.0%  3 classes:  the, of, cat
        ├─ 33.3%  the
        └─ 66.7%  2 classes:  of, cat
           ├─ 33.3%  cat
           └─ 33.3%  of
    """
    outline = _Outline(tree, words, frequencies, levels)
    n_wide = tree.n_wide
    kinds = f"{tree.n_binary:,} binary" + (f", {n_wide:,} wide" if n_wide else "")
    depth = tree.depth
    classes, nodes = (
        _count(tree.n_classes, "class", "es"),
        _count(tree.n_nodes, "inner node", "s"),
    )
    lines = [
        f"{classes} under {nodes} ({kinds}), {int(depth.min())} to {int(depth.max())} on a path",
        f"inner nodes visited: {tree.average_depth():.2f} on average over the classes",
    ]
    if frequencies is not None:
        weight = outline.weight[outline.weight > 0]
        entropy = float(-(weight * np.log2(weight)).sum())
        lines[-1] += f", {tree.average_depth(outline.weight):.2f} by frequency"
        lines.append(f"entropy of the frequencies: {max(entropy, 0.0):.2f} bits")
    lines.append("")

    def show(item: _Item, branch: str, below: str) -> None:
        count = "" if item.n_hidden or item.node < 0 else f"  {item.end - item.begin:,} classes:"
        line = f"{branch}{_percent(item.share)}{count}  "
        lines.append(line + outline.label(item, max(80 - len(line), 20), ", "))
        if item.node < 0 or item.level >= outline.levels:
            return
        outline.unfold(item, _TEXT_CHILDREN)
        for child in item.children:
            last = child is item.children[-1]
            show(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))

    show(outline.root, "", "")
    return "\n".join(lines)


def draw(
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
        ModuleNotFoundError: if matplotlib is not installed.
        TypeError: if the frequencies are not real numbers.
        ValueError: for a wrong number of words or frequencies, or ``levels`` below 1.

    Example:
        >>> import hstree
        >>> counts = range(100, 0, -1)
        >>> tree = hstree.trees.huffman_tree(counts, root=8)
        >>> hstree.trees.draw(tree, None, "tree.png", frequencies=counts)
    """
    outline = _Outline(tree, words, frequencies, levels)
    n_rows = _unfold_to_rows(outline)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font may lack a character
        figure, area = _figure(outline, n_rows)
        write_atomic(
            Path(path),
            lambda part: figure.savefig(part, format="png", dpi=150, bbox_inches=area),
        )


def _unfold_to_rows(outline: _Outline) -> int:
    """Unfolds the outline level by level and returns its number of rows."""
    n_rows = 1
    level = [outline.root]
    for _ in range(min(outline.levels, _LEVELS)):
        following: list[_Item] = []
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


def _figure(outline: _Outline, n_rows: int) -> tuple[Any, Any]:
    """The picture, and the bounding box of its content in inches."""
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

    def place(item: _Item, top: float) -> tuple[float, float]:
        """Draws a node and its subtree; returns the y-coordinates of its middle and its end."""
        left = margin + item.level * (inner_width + gap)
        if not item.children:
            middle, bottom = top + row / 2, top + row
            text = outline.label(item, _OUTER_CHARACTERS, "  ")
            share = _percent(item.share)
            if item.n_hidden:
                write(left + 0.08, middle, f"{text}, {share}", fontsize=8.5, style="italic")
                return middle, bottom
            box = FancyBboxPatch(
                (left, middle - 0.15),
                0.62,
                0.3,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor=leaf_fill if item.node < 0 else fill,
                edgecolor=line,
                linewidth=0.8,
                zorder=2,
            )
            axes.add_patch(box)
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
            axes.add_patch(
                PathPatch(
                    curve,
                    facecolor="none",
                    edgecolor=line,
                    linewidth=0.8 if child.n_hidden else 0.6 + 5 * child.share**0.5,
                    alpha=0.55,
                    linestyle=":" if child.n_hidden else "-",
                    capstyle="butt",
                    zorder=1,
                )
            )
        box = FancyBboxPatch(
            (left, middle - 0.2),
            inner_width,
            0.4,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor=fill,
            edgecolor=line,
            linewidth=0.8,
            zorder=2,
        )
        axes.add_patch(box)
        count = f"{_percent(item.share)} · {item.end - item.begin:,} classes"
        center = left + inner_width / 2
        write(center, middle - 0.085, count, fontsize=8.5, ha="center", weight="bold")
        words = outline.label(item, _INNER_CHARACTERS, "  ")
        write(center, middle + 0.095, words, fontsize=8.5, ha="center")
        return middle, bottom

    tree = outline.tree
    heading = f"{_count(tree.n_classes, 'class', 'es')}, {_count(tree.n_nodes, 'inner node', 's')}"
    if tree.root_width > 2:
        heading += f", root of {tree.root_width:,} children"
    write(margin, margin + 0.15, heading, fontsize=11, weight="bold")
    place(outline.root, margin + title)
    right = max(text.get_window_extent().x1 for text in axes.texts) / figure.dpi
    return figure, Bbox([[0, 0], [right + margin, height]])


def _depth(item: _Item) -> int:
    return max((_depth(child) + 1 for child in item.children), default=0)
