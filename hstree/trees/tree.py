"""The tree over classes: paths, wider trees, other representations and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree._checks import check_frequencies, check_int, check_int_array
from hstree.trees.arrays import TreeArrays
from hstree.trees.files import read_tree, write_tree
from hstree.trees.nested import Nested, nested_of, parents_of_nested
from hstree.trees.tables import Int64Array

_REPR_CLASSES = 16  # trees up to this size are shown in full


class Tree(TreeArrays):
    """A tree over V classes with M inner nodes; immutable and hashable.

    Every inner node has at least two children: with two it is *binary*, with more it is *wide*.
    Inner nodes are numbered in preorder; the root is 0. A tree of one class has no inner node. A
    child with one leaf position is a leaf. Any other child is the inner node with the same interval
    of leaf positions.

    Args:
        order: class at each leaf position, int [V]: a permutation of 0 .. V - 1.
        node_offset: the boundaries of node m are
            ``boundary[node_offset[m]:node_offset[m + 1]]``, int [M + 1].
        boundary: boundaries b_0 < b_1 < ... < b_c of each node, int [node_offset[M]]: child k has
            the leaf positions b_k to b_{k + 1} - 1.

    Raises:
        TypeError: if an array does not consist of integers.
        ValueError: if ``order`` is not a permutation, boundaries do not increase, the nodes are not
            the preorder of a tree, or a path has more than MAX_DEPTH inner nodes.

    Example:
        >>> from hstree.trees import Tree
        >>> tree = Tree(order=[2, 0, 1], node_offset=[0, 3, 6], boundary=[0, 1, 3, 1, 2, 3])
        >>> tree.to_nested()
        (2, (0, 1))
        >>> tree.path(1)
        [(0, 1), (1, 1)]
    """

    __slots__ = ()

    # Paths

    def path(self, class_id: int) -> list[tuple[int, int]]:
        """The inner nodes on the path of a class, root first, as (node, child ordinal)."""
        class_id = check_int("class_id", class_id, 0, self.n_classes - 1)
        edges = self.edges()
        position = int(np.flatnonzero(self._order == class_id)[0])
        path = []
        node = 0 if self.n_nodes else -1
        while node >= 0:
            first, last = int(self._node_offset[node]), int(self._node_offset[node + 1])
            child = int(np.searchsorted(self._boundary[first:last], position, side="right")) - 1
            path.append((node, child))
            node = int(edges.child_node[first - node + child])
        return path

    def code(self, class_id: int) -> tuple[int, ...]:
        """The child ordinals on the path of a class, root first: 0 is left at a binary node."""
        return tuple(child for _, child in self.path(class_id))

    def average_depth(self, frequencies: npt.ArrayLike | None = None) -> float:
        """Average number of inner nodes on a path: sum_c f_c depth_c / sum_c f_c.

        Args:
            frequencies: class frequencies, real [V], finite, none negative, not all zero; None:
                every class counts once.
        """
        if frequencies is None:
            return float(self.depth.mean())
        weight = check_frequencies(frequencies, self.n_classes)
        total = float(weight.sum())
        if total <= 0:
            raise ValueError(f"frequencies: expected a positive sum, got {total}")
        return float((weight / total) @ self.depth)

    # Wider trees

    def collapse(
        self,
        root: int = 1,
        leaf: int = 1,
        levels: int | None = None,
        frequencies: npt.ArrayLike | None = None,
    ) -> Tree:
        """A tree with the same order of leaves, whose top and small subtrees are single softmaxes.

        The root becomes one softmax over at most C = ``root`` clusters. They start as the children
        of the root. The heaviest inner node among them is replaced by its children, repeatedly,
        while there are at most C clusters. The weight of a node is its frequency mass, or its
        number of leaves without frequencies; ties go to more leaves, then to the left. A node with
        too many children is not replaced, and a root with more than C children does not change.
        Then every maximal subtree of at most G = ``leaf`` leaves becomes one softmax, a group.

        The nodes between the root and the groups stay, unless the number of levels is given: with
        two levels every cluster is one softmax over its classes; with three, over its groups and
        the classes that are in none.

        C = 1 and G = 1 without ``levels`` do not change the tree; max(C, G) >= V gives the flat
        softmax.

        Args:
            root: largest width of the root, C >= 1.
            leaf: largest size of a leaf group, G >= 1; with two levels, 1.
            levels: largest number of inner nodes on a path, 2 or 3; None: any number.
            frequencies: class frequencies, real [V], finite, none negative.

        Raises:
            TypeError: if the frequencies are not real numbers.
            ValueError: for a value out of range, or ``leaf`` above 1 with two levels.

        Example:
            >>> import hstree
            >>> tree = hstree.trees.random_tree(1000)
            >>> tree.collapse(root=16, leaf=8)
            Tree(n_classes=1000, n_binary=112, n_wide=129, root_width=16, height=5)
            >>> tree.collapse(root=16, leaf=8, levels=3)
            Tree(n_classes=1000, n_binary=0, n_wide=145, root_width=16, height=3)
            >>> tree.collapse(root=16, levels=2)
            Tree(n_classes=1000, n_binary=0, n_wide=17, root_width=16, height=2)
        """
        if levels is not None:
            levels = check_int("levels", levels, 2, 3)
        if levels == 2 and check_int("leaf", leaf, 1) > 1:
            raise ValueError(
                f"leaf: expected 1 with levels=2, where a cluster is one softmax, got {leaf}"
            )
        root = min(check_int("root", root, 1), self.n_classes)
        leaf = min(check_int("leaf", leaf, 1), self.n_classes)
        weight = None if frequencies is None else check_frequencies(frequencies, self.n_classes)
        if levels is None and root <= 2 and leaf <= 2 and self.is_binary:
            return self
        return Tree._adopt(_host.collapse(*self._raw(), root, leaf, levels or 0, weight))

    # Other representations

    @classmethod
    def from_parents(cls, parent: npt.ArrayLike, leaf_class: npt.ArrayLike | None = None) -> Tree:
        """A tree given by the parent of every node, inner nodes and leaves.

        Nodes may have any numbers. A node without children is a leaf. Any other node needs at least
        two children; their order from left to right is that of their numbers.

        Args:
            parent: parent of each node, -1 for the root, int [M + V].
            leaf_class: class of each leaf, -1 for inner nodes, int [M + V]; None: the class of a
                leaf is its rank among the leaves. If the nodes 0 .. V - 1 are the leaves, node c
                is then class c.

        Raises:
            ValueError: for no root or several, a cycle, an only child, classes that are not a
                permutation, or a tree that is too deep.

        Example:
            >>> from hstree.trees import Tree
            >>> Tree.from_parents([3, 4, 4, -1, 3])
            Tree.from_nested((0, (1, 2)))
        """
        parents = check_int_array("parent", parent, np.int64)
        if leaf_class is None:
            return cls._adopt(_host.from_parents(parents, None))
        classes = check_int_array("leaf_class", leaf_class, np.int64)
        if len(classes) != len(parents):
            raise ValueError(
                f"leaf_class: expected {len(parents)} entries, as many as parent, "
                f"got {len(classes)}"
            )
        return cls._adopt(_host.from_parents(parents, classes))

    def to_parents(self) -> tuple[Int64Array, Int64Array]:
        """Arguments (parent, leaf_class) of :meth:`from_parents`; nodes numbered in preorder."""
        return _host.to_parents(*self._raw())

    @classmethod
    def from_nested(cls, nested: Any) -> Tree:
        """A tree given as nested tuples (or lists) of classes, such as ``((0, 1), (2, 3, 4))``.

        The tree of one class is 0.

        Raises:
            TypeError: for an entry that is neither an integer nor a tuple.
            ValueError: for a tuple with fewer than two entries, classes that are not a permutation
                of 0 .. V - 1, or a tree that is too deep.

        Example:
            >>> from hstree.trees import Tree
            >>> Tree.from_nested(((0, 1), (2, 3, 4))).n_wide
            1
        """
        return cls.from_parents(*parents_of_nested(nested))

    def to_nested(self) -> Nested:
        """The tree as nested tuples of classes; 0 for V = 1."""
        return nested_of(self.order, self.node_offset, self.edges())

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tree to a safetensors file.

        An existing file is replaced atomically, and not changed on an error.
        """
        write_tree(Path(path), self.arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tree:
        """Read a tree that :meth:`save` wrote.

        Raises:
            FileNotFoundError: if the file does not exist.
            ValueError: if the file is truncated, is not a safetensors file, or does not contain a
                valid tree.
        """
        arrays = read_tree(Path(path))
        try:
            return cls(**arrays)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        if self.n_classes <= _REPR_CLASSES:
            return f"Tree.from_nested({self.to_nested()!r})"
        return (
            f"Tree(n_classes={self.n_classes}, n_binary={self.n_binary}, n_wide={self.n_wide}, "
            f"root_width={self.root_width}, height={self.height})"
        )
