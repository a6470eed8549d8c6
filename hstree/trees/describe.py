"""The top levels of a tree as text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hstree._checks import check_frequencies, check_int
from hstree.trees.tree import Tree

CHILDREN, ROWS = 12, 36  # at most, of a node and of an outline


@dataclass
class Item:
    """A node (-1: a leaf, or siblings that are not shown), its mass and its most frequent words."""

    node: int
    share: float
    text: str
    children: list[Item] = field(default_factory=list)


def outline(
    tree: Tree, frequencies: npt.ArrayLike | None, words: Sequence[str] | None, levels: int
) -> Item:
    """The root, with the nodes below it that are shown. Arguments and errors as of describe."""
    if words is not None and len(words) != tree.n_classes:
        raise ValueError(f"words: expected {tree.n_classes} words, got {len(words)}")
    weight = np.ones(tree.n_classes)
    if frequencies is not None and np.any(given := check_frequencies(frequencies, len(weight))):
        weight = given
    share, edges = tree.edge_masses(weight / weight.sum()), tree.edges()

    def item(node: int, begin: int, end: int, mass: float) -> Item:
        classes = tree.order[begin:end]
        top = classes[np.lexsort((classes, -weight[classes]))[:20]].tolist()
        names = [f"#{c}" if words is None else words[c] for c in top]
        names = [n if n and n.isprintable() else repr(n) for n in names]
        text = ", ".join(names + ["…"] * (len(names) < len(classes)))
        text = textwrap.shorten(text, 44, placeholder=" …")
        return Item(node, mass, f"{len(classes):,} classes: {text}" if node >= 0 else text)

    root = item(0 if tree.n_nodes else -1, 0, tree.n_classes, 1.0)
    level, shown = [root] * (tree.n_nodes > 0), 1
    for depth in range(check_int("levels", levels)):
        for parent in sorted(level, key=lambda parent: -parent.share):
            node = parent.node
            first, last = (int(tree.node_offset[node + k]) - node - k for k in (0, 1))
            kept = first + np.argsort(-share[first:last], kind="stable")
            if len(kept) > CHILDREN:
                inner = edges.child_node[kept] >= 0
                kept = np.concatenate([kept[~inner][: CHILDREN // 2], kept[inner]])[:CHILDREN]
            if depth and shown + len(kept) > ROWS:
                continue
            shown += len(kept)
            for e in kept.tolist():
                place = int(edges.child_node[e]), int(edges.begin[e]), int(edges.end[e])
                parent.children.append(item(*place, float(share[e])))
            if more := last - first - len(kept):
                rest = max(0.0, parent.share - sum(child.share for child in parent.children))
                parent.children.append(Item(-1, rest, f"… {more:,} more"))
        level = [child for parent in level for child in parent.children if child.node >= 0]
    return root


def describe(
    tree: Tree,
    frequencies: npt.ArrayLike | None = None,
    words: Sequence[str] | None = None,
    levels: int = 3,
) -> str:
    """Sizes and depths of a tree, and its top ``levels`` with masses and frequent words, as text:
    the 12 heaviest children of a node, of which at most 6 are leaves, in about 36 lines.

    Masses are of class ``frequencies``, real [V], finite, none negative; None or all zero: every
    class counts once. ``words``: names of the V classes; None: their numbers. Raises ValueError for
    a wrong number of words or frequencies, or ``levels`` below 1; TypeError for no real numbers.

    Example:
        >>> import hstree
        >>> tree = hstree.trees.huffman_tree([5, 3, 2])
        >>> print(hstree.trees.describe(tree, words=["the", "of", "cat"]))
        classes 3, inner nodes 2 (0 wide), on a path 1 to 2, on average 1.67
        100%  3 classes: the, of, cat
        ├─ 66.7%  2 classes: of, cat
        │  ├─ 33.3%  cat
        │  └─ 33.3%  of
        └─ 33.3%  the
    """
    root, depth = outline(tree, frequencies, words, levels), tree.depth
    lines = [
        f"classes {tree.n_classes:,}, inner nodes {tree.n_nodes:,} ({tree.n_wide:,} wide), "
        f"on a path {depth.min()} to {depth.max()}, on average {tree.average_depth():.2f}"
    ]

    def show(item: Item, branch: str, below: str) -> None:
        lines.append(f"{branch}{100 * item.share:.3g}%  {item.text}")
        for child in item.children:
            last = child is item.children[-1]
            show(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))

    show(root, "", "")
    return "\n".join(lines)
