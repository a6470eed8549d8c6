"""The tree over classes."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree._checks import check_frequencies, check_int, check_int_array
from hstree.trees.files import read_tree, write_tree
from hstree.trees.nested import Nested, nested_of, parents_of_nested
from hstree.trees.tables import Int32Array, Int64Array, TreeEdges, TreeTables, tree_tables

if TYPE_CHECKING:
    from typing_extensions import Self

_REPR_CLASSES = 16  # trees up to this size are shown in full


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class Tree:
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
        copy: whether the tree gets its own copy of the arrays. False: it keeps contiguous ones of
            its dtypes (int32, int64 and int32), which become read-only and must not change.

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

    __slots__ = (
        "_boundary",
        "_depth",
        "_fingerprint",
        "_node_offset",
        "_order",
    )

    def __init__(self, order: Any, node_offset: Any, boundary: Any, *, copy: bool = True) -> None:
        self._set(
            check_int_array("order", order, np.int32, copy),
            check_int_array("node_offset", node_offset, np.int64, copy),
            check_int_array("boundary", boundary, np.int32, copy),
        )

    def _set(self, order: Int32Array, node_offset: Int64Array, boundary: Int32Array) -> None:
        _host.validate(order, node_offset, boundary)
        self._order: Int32Array = _frozen(order)
        self._node_offset: Int64Array = _frozen(node_offset)
        self._boundary: Int32Array = _frozen(boundary)
        self._depth: Int32Array | None = None
        self._fingerprint: str | None = None

    @classmethod
    def _adopt(cls, arrays: tuple[Int32Array, Int64Array, Int32Array]) -> Self:
        """A tree that uses the given arrays without copying them."""
        tree = cls.__new__(cls)
        tree._set(*arrays)
        return tree

    # The representation

    @property
    def order(self) -> Int32Array:
        """The class at each leaf position, int32 [V]; read-only."""
        return self._order

    @property
    def node_offset(self) -> Int64Array:
        """Begin of each node's boundaries, int64 [M + 1]; read-only."""
        return self._node_offset

    @property
    def boundary(self) -> Int32Array:
        """Boundaries of all nodes, int32; read-only."""
        return self._boundary

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The three arrays by name: ``Tree(**tree.arrays()) == tree``."""
        return {
            "order": self._order,
            "node_offset": self._node_offset,
            "boundary": self._boundary,
        }

    @property
    def n_classes(self) -> int:
        """The number of classes, V, equal to the number of leaves."""
        return len(self._order)

    @property
    def n_nodes(self) -> int:
        """The number of inner nodes, M."""
        return len(self._node_offset) - 1

    @property
    def n_edges(self) -> int:
        """The number of pairs (inner node, child), E = M + V - 1."""
        return self.n_nodes + self.n_classes - 1

    @property
    def n_children(self) -> Int64Array:
        """The number of children of each inner node, int64 [M]."""
        return np.diff(self._node_offset) - 1

    @property
    def n_binary(self) -> int:
        """The number of inner nodes with two children."""
        return int(np.count_nonzero(self.n_children == 2))

    @property
    def n_wide(self) -> int:
        """The number of inner nodes with more than two children."""
        return self.n_nodes - self.n_binary

    @property
    def is_binary(self) -> bool:
        """Whether every inner node has two children (true for V = 1)."""
        return self.n_nodes == self.n_classes - 1

    @property
    def root_width(self) -> int:
        """The number of children of the root; 0 for V = 1."""
        return int(self._node_offset[1]) - 1 if self.n_nodes else 0

    @property
    def depth(self) -> Int32Array:
        """The number of inner nodes on the path of each class, int32 [V]; read-only."""
        if self._depth is None:
            self._depth = _frozen(_host.class_depth(*self._raw()))
        return self._depth

    @property
    def height(self) -> int:
        """The number of inner nodes on the longest path, at most MAX_DEPTH."""
        return int(self.depth.max())

    def _raw(self) -> tuple[Int32Array, Int64Array, Int32Array]:
        return self._order, self._node_offset, self._boundary

    # Tables

    def tables(self, groups: bool = False) -> TreeTables:
        """The tables that the kernels read, in O(V) and the sizes of the tables.

        Args:
            groups: whether the tree is read as one of two levels, a root and groups of classes.

        Raises:
            ValueError: for a tree of another shape: without ``groups``, the nodes below the root
                are binary.
        """
        return tree_tables(self._raw(), groups)

    def edges(self) -> TreeEdges:
        """All pairs (inner node, child), in O(V)."""
        return TreeEdges(*map(_frozen, _host.edges(*self._raw())))

    def edge_masses(self, frequencies: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The mass below every edge, float64 [E]: the sum of the frequencies of its classes.

        Summed from the leaves upwards, children from left to right: there is no cancellation, and a
        node's mass is exactly the sum of its children's. The log-odds of a binary node m are the
        logarithm of the ratio of the masses of its edges ``e = tree.node_offset[m] - m`` and
        ``e + 1``.

        Args:
            frequencies: class frequencies, real [V], finite, none negative.
        """
        return _host.edge_masses(*self._raw(), check_frequencies(frequencies, self.n_classes))

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
            # The last child that begins at the position or before it.
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
        clusters: int,
        *,
        binary: bool = False,
        frequencies: npt.ArrayLike | None = None,
        max_group: int | None = None,
    ) -> Tree:
        """A tree with the same order of leaves whose root has C = ``clusters`` children, each a
        cluster of classes.

        The clusters start as the children of the root. The heaviest inner node among them is
        replaced by its children, repeatedly, while there are at most C clusters. The weight of a
        node is its frequency mass, or its number of leaves without frequencies; ties go to more
        leaves, then to the left. A node with too many children is not replaced, and a root with
        more than C children does not change.

        The result has two levels: each cluster is one softmax over its classes, a group. With
        ``binary`` the nodes below the clusters stay as they are. C = V gives the flat softmax.

        With two levels no cluster has more than B = ``max_group`` classes, by default ::

            B = ceil(4 max(sqrt(V), V / C))

        which is four times the mean of V / C for a root of at most sqrt(V). A cluster of n > B
        classes counts as ceil(n / B) of the C children of the root. It is divided where the root
        has no room for its children: into ceil(n / B) parts of equal size, in the order of the
        leaves. Since the heaviest clusters are replaced first, those that are divided hold rare
        classes and classes that never occur. Without the bound, the latter could be one cluster
        with half of all classes, and every step with one of its classes would score it as a whole.
        The bound goes before C: the root is wider than C if C B < V or if the tree's own root is.

        Args:
            clusters: number of children of the root, C >= 2; fewer if there are fewer classes.
            binary: whether the nodes below the clusters stay.
            frequencies: class frequencies, real [V], finite, none negative.
            max_group: largest number of classes of a cluster, B >= 1, with two levels; V: no bound.

        Raises:
            TypeError: if the frequencies are not real numbers.
            ValueError: for a value out of range, or ``max_group`` with ``binary``.

        Example:
            >>> import hstree
            >>> tree = hstree.trees.random_tree(1000)
            >>> tree.collapse(16)
            Tree(n_classes=1000, n_binary=0, n_wide=17, root_width=16, height=2)
            >>> tree.collapse(16, binary=True)
            Tree(n_classes=1000, n_binary=984, n_wide=1, root_width=16, height=7)

            Twenty classes occur, and 980 do not:

            >>> counts = [9] * 20 + [0] * 980
            >>> tree = hstree.trees.huffman_tree(counts)
            >>> [
            ...     int(tree.collapse(16, frequencies=counts, max_group=size).n_children.max())
            ...     for size in (1000, None, 100)
            ... ]
            [981, 246, 99]
        """
        n = self.n_classes
        clusters = min(check_int("clusters", clusters, min(2, n)), n)
        if max_group is None:
            max_group = n if binary else max(math.isqrt(16 * n - 1) + 1, -(-4 * n // clusters))
        elif binary:
            raise ValueError(f"max_group: expected None with binary=True, got {max_group}")
        max_group = min(check_int("max_group", max_group, 1), n)
        weight = None if frequencies is None else check_frequencies(frequencies, n)
        if binary and clusters <= 2 and self.is_binary:
            return self
        return Tree._adopt(_host.collapse(*self._raw(), clusters, binary, max_group, weight))

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
            return cls(**arrays, copy=False)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    # Identity

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits computed from the three arrays, the same on every machine."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            for name, array in self.arrays().items():
                digest.update(f"{name}:{len(array)};".encode())
                digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tree):
            return NotImplemented
        return self is other or (
            np.array_equal(self._order, other._order)
            and np.array_equal(self._node_offset, other._node_offset)
            and np.array_equal(self._boundary, other._boundary)
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[Int32Array, Int64Array, Int32Array]]:
        return type(self), self._raw()

    def __repr__(self) -> str:
        if self.n_classes <= _REPR_CLASSES:
            return f"Tree.from_nested({self.to_nested()!r})"
        return (
            f"Tree(n_classes={self.n_classes}, n_binary={self.n_binary}, n_wide={self.n_wide}, "
            f"root_width={self.root_width}, height={self.height})"
        )
