"""The number and the shape of the trees of an ensemble, with defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._checks import check_int
from hstree.trees import Tree, build_ensemble, word_vectors
from hstree.trees.vectors import Context

if TYPE_CHECKING:
    from typing_extensions import Self

CONTEXTS: tuple[Context, ...] = ("left", "both")
MANY_CLASSES = 1 << 16
FLAT_CLASSES = 1024
TWO_LEVEL_CLASSES = 12_000
GROUP = 16
USUAL_ROOT = 256

BUILD_TREES = (
    "to build trees from class counts call TreeEnsemble.from_counts(in_features, counts), from a "
    "text from_tokens, from features and labels from_features; the number of trees is their n_trees"
)


@dataclass(frozen=True)
class TreeShape:
    """Number and shape of the trees that an ensemble builds.

    Attributes:
        n_trees: number of trees, T.
        root: width of the root, C of :meth:`hstree.trees.Tree.collapse`.
        leaf: size of the leaf groups, G of :meth:`hstree.trees.Tree.collapse`.
        levels: number of levels of :meth:`hstree.trees.Tree.collapse`, 2 or 3; None: any number of
            binary nodes between the root and the leaf groups.

    Example:
        >>> from hstree.heads import TreeShape
        >>> TreeShape.for_classes(1000)
        TreeShape(n_trees=1, root=1000, leaf=1, levels=2)
        >>> TreeShape.for_classes(50_000)
        TreeShape(n_trees=4, root=256, leaf=1, levels=2)
        >>> TreeShape.for_classes(50_000, sparse=True)
        TreeShape(n_trees=4, root=256, leaf=16, levels=None)
    """

    n_trees: int
    root: int
    leaf: int
    levels: int | None

    @classmethod
    def for_classes(
        cls,
        n_classes: int,
        sparse: bool = False,
        *,
        n_trees: int | None = None,
        root: int | None = None,
        leaf: int | None = None,
        levels: int | None = None,
    ) -> Self:
        """The values given, and defaults for None.

        - ``n_trees``: 4, or 1 for at most 1,024 classes.
        - ``root``: 256, or the smallest power of two that is at least the square root of V if that
          is more, which it is from V = 65,537; but at most V / 4, because trees with too wide a
          root would hardly differ. One tree over at most 1,024 classes is a single node, which is a
          softmax and costs no more than four roots of 256 children.
        - ``levels``: 2, a root and below each of its children one softmax over its classes; but
          None if ``leaf`` is given or the root is binary, and from V = 12,001 with row-sparse
          gradients: clusters of rare classes are large, and below two levels a batch would reach
          almost all rows. From there binary nodes save more than a tenth of the time of a dense
          step on a CPU, for 2% in perplexity; below, they save less.
        - ``leaf``: 1, but 16 with three levels, and from V = 12,001 with row-sparse gradients
          unless the root is binary.

        The measurements are in ``trees-study.md`` of the benchmark results.

        Args:
            n_classes: number of classes, V.
            sparse: whether the gradients are row-sparse.
            n_trees, root, leaf, levels: values of the shape.
        """
        flat = n_classes <= FLAT_CLASSES
        if n_trees is None:
            n_trees = 1 if flat else 4
        if root is None and flat and n_trees == 1:
            root = n_classes
        elif root is None:
            square_root = 1 << ((n_classes - 1).bit_length() + 1) // 2
            root = max(1, min(max(USUAL_ROOT, square_root), n_classes // 4))
        if leaf is None and levels is None and root > 2:
            if sparse and n_classes > TWO_LEVEL_CLASSES:
                leaf = GROUP
            else:
                levels = 2
        if leaf is None:
            leaf = GROUP if levels == 3 else 1
        return cls(n_trees, root, leaf, levels)

    def node_vectors(self, n_classes: int, tied: bool = False) -> str:
        """The default of ``node_vectors``: trees whose leaves are groups share the output embedding
        of their classes, unless the root has all classes as its children and nothing is tied."""
        grouped = (self.levels is not None or self.leaf > 1) and self.root < n_classes
        return "leaves" if tied or grouped else "free"

    def build(
        self,
        recipe: str,
        n_classes: int,
        frequencies: npt.ArrayLike | None,
        vectors: Sequence[npt.ArrayLike] | None,
        seed: int,
        options: Mapping[str, Any] | None = None,
    ) -> list[Tree]:
        """:func:`hstree.trees.build_ensemble`; several clustered trees get noise by default, so
        that they differ."""
        if options is None:
            options = {"noise": 0.3} if recipe == "cluster" and self.n_trees > 1 else {}
        shape = (self.root, self.leaf, self.levels)
        return build_ensemble(
            recipe, n_classes, self.n_trees, frequencies, vectors, seed, *shape, **options
        )

    def build_from_tokens(
        self,
        recipe: str,
        n_classes: int,
        frequencies: npt.ArrayLike,
        tokens: npt.ArrayLike,
        contexts: Sequence[Context],
        seed: int,
        options: Mapping[str, Any] | None,
    ) -> list[Tree]:
        """:meth:`build` with word vectors of a text; see :meth:`TreeEnsemble.from_tokens`."""
        vectors = None
        if recipe == "cluster":
            n_features = 32 if n_classes > MANY_CLASSES else 100
            ids = np.asarray(tokens).reshape(-1)
            vectors = [
                word_vectors(ids, n_classes, context=context, n_features=n_features)
                for context in contexts[: self.n_trees]
            ]
        return self.build(recipe, n_classes, frequencies, vectors, seed, options)


def check_trees(trees: Sequence[Tree], n_classes: int) -> list[Tree]:
    """The trees as a list.

    Raises:
        TypeError: if they are not a list of trees.
        ValueError: unless they are trees over V classes with roots of the same width.
    """
    if isinstance(trees, Tree):
        raise TypeError("trees: expected a list of trees, got one Tree; pass [tree]")
    if not isinstance(trees, Sequence) or not all(isinstance(tree, Tree) for tree in trees):
        raise TypeError(
            f"trees: expected a list of hstree.trees.Tree, got {_what(trees)}; {BUILD_TREES}"
        )
    if not trees:
        raise ValueError(f"trees: expected at least one tree, got none; {BUILD_TREES}")
    for t, tree in enumerate(trees):
        if tree.n_classes != n_classes:
            raise ValueError(f"trees[{t}]: expected {n_classes} classes, got {tree.n_classes}")
        if tree.root_width != trees[0].root_width:
            raise ValueError(
                f"trees[{t}]: expected a root of {trees[0].root_width} children as in trees[0], "
                f"got {tree.root_width}"
            )
    return list(trees)


def _what(trees: Any) -> str:
    name = type(trees).__name__
    if isinstance(trees, (list, tuple)):
        other = next(tree for tree in trees if not isinstance(tree, Tree))
        return f"a {name} with a {type(other).__name__}"
    return f"a {name}"


def draw_subsets(
    n_trees: int, in_features: int, subset_size: int, subset_block: int, seed: int
) -> Tensor | None:
    """Features of each tree, int32 [T, S], increasing; None if S = D.

    Raises:
        ValueError: for sizes out of range.
    """
    check_int("subset_size", subset_size, 1, in_features)
    check_int("subset_block", subset_block)
    if in_features % subset_block or subset_size % subset_block:
        raise ValueError(
            f"subset_block: expected a divisor of in_features ({in_features}) and of "
            f"subset_size ({subset_size}), got {subset_block}"
        )
    if subset_size == in_features:
        return None
    random = np.random.default_rng(seed)
    blocks, taken = in_features // subset_block, subset_size // subset_block
    drawn = np.stack([np.sort(random.permutation(blocks)[:taken]) for _ in range(n_trees)])
    features = drawn[:, :, None] * subset_block + np.arange(subset_block)
    return torch.tensor(features.reshape(n_trees, subset_size), dtype=torch.int32, device="cpu")
