"""The top levels of a tree as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hstree._checks import check_frequencies, check_int
from hstree.trees.tree import Tree

_TEXT_CHILDREN = 6  # children of a node that `describe` shows


@dataclass
class Item:
    """A node of the outline, or the rest of its siblings (``n_hidden`` > 0)."""

    node: int  # inner node, -1 for a leaf
    begin: int
    end: int
    share: float  # of the whole mass
    level: int
    children: list[Item] = field(default_factory=list)
    n_hidden: int = 0


class Outline:
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
        self.root = Item(root, 0, tree.n_classes, 1.0, 0)

    def unfold(self, item: Item, most: int) -> None:
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
            Item(
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
                Item(-1, item.begin, item.end, share, item.level + 1, n_hidden=n_hidden)
            )

    def label(self, item: Item, width: int, separator: str) -> str:
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


def count_of(n: int, noun: str, plural: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else plural)


def percent(share: float) -> str:
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
    outline = Outline(tree, words, frequencies, levels)
    n_wide = tree.n_wide
    kinds = f"{tree.n_binary:,} binary" + (f", {n_wide:,} wide" if n_wide else "")
    depth = tree.depth
    classes, nodes = (
        count_of(tree.n_classes, "class", "es"),
        count_of(tree.n_nodes, "inner node", "s"),
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

    def show(item: Item, branch: str, below: str) -> None:
        count = "" if item.n_hidden or item.node < 0 else f"  {item.end - item.begin:,} classes:"
        line = f"{branch}{percent(item.share)}{count}  "
        lines.append(line + outline.label(item, max(80 - len(line), 20), ", "))
        if item.node < 0 or item.level >= outline.levels:
            return
        outline.unfold(item, _TEXT_CHILDREN)
        for child in item.children:
            last = child is item.children[-1]
            show(child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "))

    show(outline.root, "", "")
    return "\n".join(lines)
