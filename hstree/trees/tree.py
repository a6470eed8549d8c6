"""The tree over classes: one order of the leaves, and the intervals that its inner nodes own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as safetensors_bytes

from hstree import _host
from hstree._files import write_atomic
from hstree.trees._checks import check_frequencies, check_int, integer_array

MAX_DEPTH: int = _host.MAX_DEPTH
"""Inner nodes on the longest path that a tree may have."""

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float64Array: TypeAlias = npt.NDArray[np.float64]
Nested: TypeAlias = Union[int, "tuple[Nested, ...]"]

_FORMAT = "hstree.Tree"
_VERSION = "1"
_DTYPES = {"order": np.int32, "node_offset": np.int64, "boundary": np.int32}
_REPR_CLASSES = 16  # trees up to this size are shown in full


@dataclass(frozen=True, eq=False)
class TreeTables:
    """What the kernels read of a tree of V classes; arrays are read-only.

    Binary nodes are renumbered 0 .. n_binary - 1 in preorder, and the rows of all wide nodes other
    than a wide root 0 .. n_wide_rows - 1, nodes in preorder and children from left to right. A wide
    root's rows are its children.

    Attributes:
        leaf_position: int32 [V], position of each class among the leaves from the left.
        path_offset: int64 [V + 1], class c's binary nodes are
            ``path[path_offset[c]:path_offset[c + 1]]``.
        path: int32 [P], ``node << 1 | goes_left``, root first.
        wide_offset: int64 [V + 1], class c's wide nodes are
            ``wide_path[wide_offset[c]:wide_offset[c + 1]]``.
        wide_path: int32 [Pw, 3], (first_row, width, child) of the wide nodes other than the root,
            root first.
        root_child: int32 [V], child of the root that holds the class; None unless the root is wide.
        root_width: number of children of a wide root, else 0.
        n_binary: number of binary nodes.
        n_wide_rows: number of rows of the wide nodes other than the root.
        max_depth: binary nodes on the path of the class that has most of them.
        max_width: largest sum of widths over the ``wide_path`` of a class.
    """

    leaf_position: Int32Array
    path_offset: Int64Array
    path: Int32Array
    wide_offset: Int64Array
    wide_path: Int32Array
    root_child: Int32Array | None
    root_width: int
    n_binary: int
    n_wide_rows: int
    max_depth: int
    max_width: int


@dataclass(frozen=True, eq=False)
class TreeEdges:
    """All E = M + V - 1 pairs (inner node, child), nodes in preorder, children left to right.

    Edge (m, k) has index ``tree.node_offset[m] - m + k``.

    Attributes:
        node: int32 [E], inner node above.
        ordinal: int32 [E], which child of it.
        child_node: int32 [E], inner node below, or -1 for a leaf.
        begin, end: int32 [E], the leaf positions [begin, end) below.
        parent_edge: int32 [E], edge above ``node``, or -1 at the root.
        depth: int32 [E], edges above; 0 for the root's children.
    """

    node: Int32Array
    ordinal: Int32Array
    child_node: Int32Array
    begin: Int32Array
    end: Int32Array
    parent_edge: Int32Array
    depth: Int32Array


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class Tree:
    """A tree over V classes with M inner nodes of two children or more; immutable, hashable.

    Inner nodes are numbered in preorder, the root is 0 (V = 1 has none). A child that owns one leaf
    position is a leaf; otherwise it is the inner node with exactly that interval. A node of two
    children is *binary*, with more children it is *wide*.

    Args:
        order: int [V], the class at each leaf position: a permutation of 0 .. V - 1.
        node_offset: int [M + 1], node m's boundaries are ``boundary[node_offset[m]:node_offset[m +
            1]]``.
        boundary: int [node_offset[M]], per node b_0 < b_1 < ... < b_c; child k owns the leaf
            positions [b_k, b_{k + 1}).

    Raises:
        ValueError: naming the first entry that is wrong, found in O(V): ``order`` no permutation,
            boundaries not increasing, nodes that are not the preorder of a tree, more than
            MAX_DEPTH inner nodes on a path.
        TypeError: an array is not of integers.

    Example:
        >>> tree = Tree(order=[2, 0, 1], node_offset=[0, 3, 6], boundary=[0, 1, 3, 1, 2, 3])
        >>> tree.to_nested()
        (2, (0, 1))
        >>> tree.path(1)
        [(0, 1), (1, 1)]
    """

    __slots__ = (
        "_boundary",
        "_depth",
        "_edges",
        "_fingerprint",
        "_node_offset",
        "_order",
        "_tables",
    )

    def __init__(self, order: Any, node_offset: Any, boundary: Any) -> None:
        self._set(
            integer_array("order", order, np.int32),
            integer_array("node_offset", node_offset, np.int64),
            integer_array("boundary", boundary, np.int32),
        )

    def _set(self, order: Int32Array, node_offset: Int64Array, boundary: Int32Array) -> None:
        _host.validate(order, node_offset, boundary)
        self._order: Int32Array = _frozen(order)
        self._node_offset: Int64Array = _frozen(node_offset)
        self._boundary: Int32Array = _frozen(boundary)
        self._depth: Int32Array | None = None
        self._edges: TreeEdges | None = None
        self._tables: TreeTables | None = None
        self._fingerprint: str | None = None

    @classmethod
    def _adopt(cls, arrays: tuple[Int32Array, Int64Array, Int32Array]) -> Tree:
        """Takes over arrays that nobody else holds."""
        tree = cls.__new__(cls)
        tree._set(*arrays)
        return tree

    # The representation

    @property
    def order(self) -> Int32Array:
        """int32 [V], the class at each leaf position; read-only."""
        return self._order

    @property
    def node_offset(self) -> Int64Array:
        """int64 [M + 1], where each node's boundaries begin; read-only."""
        return self._node_offset

    @property
    def boundary(self) -> Int32Array:
        """int32, boundaries of all nodes; read-only."""
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
        """V, the number of classes, which is the number of leaves."""
        return len(self._order)

    @property
    def n_leaves(self) -> int:
        """V, the number of leaves."""
        return len(self._order)

    @property
    def n_nodes(self) -> int:
        """M, the number of inner nodes."""
        return len(self._node_offset) - 1

    @property
    def n_edges(self) -> int:
        """E = M + V - 1, the number of pairs (inner node, child)."""
        return self.n_nodes + self.n_classes - 1

    @property
    def n_children(self) -> Int64Array:
        """int64 [M], the number of children of each inner node."""
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
        """Whether every inner node has two children (so it is for V = 1)."""
        return self.n_nodes == self.n_classes - 1

    @property
    def root_width(self) -> int:
        """The number of children of the root; 0 for V = 1."""
        return int(self._node_offset[1]) - 1 if self.n_nodes else 0

    @property
    def depth(self) -> Int32Array:
        """int32 [V], inner nodes on the path of each class; read-only."""
        if self._depth is None:
            self._depth = _frozen(_host.class_depth(*self._raw()))
        return self._depth

    @property
    def height(self) -> int:
        """Inner nodes on the longest path, at most MAX_DEPTH."""
        return int(self.depth.max())

    def _raw(self) -> tuple[Int32Array, Int64Array, Int32Array]:
        return self._order, self._node_offset, self._boundary

    # Tables

    def tables(self) -> TreeTables:
        """What the kernels read; computed once and kept."""
        if self._tables is None:
            values = _host.tables(*self._raw())
            self._tables = TreeTables(
                *(_frozen(value) if isinstance(value, np.ndarray) else value for value in values)  # type: ignore[arg-type]
            )
        return self._tables

    def edges(self) -> TreeEdges:
        """All pairs (inner node, child); computed once and kept."""
        if self._edges is None:
            self._edges = TreeEdges(*map(_frozen, _host.edges(*self._raw())))
        return self._edges

    def edge_masses(self, frequencies: npt.ArrayLike) -> Float64Array:
        """The mass below every edge, float64 [E]: the sum of the frequencies of its classes.

        Summed from the leaves upwards, children from left to right, so that no mass suffers from
        cancellation and a node's mass is exactly the sum of its children's. The log-odds of a
        binary node m are the log of the ratio of the masses of its edges ``e = tree.node_offset[m]
        - m`` and ``e + 1``.

        Args:
            frequencies: real [V], finite, none negative.
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
            child = int(np.searchsorted(self._boundary[first:last], position, side="right")) - 1
            path.append((node, child))
            node = int(edges.child_node[first - node + child])
        return path

    def code(self, class_id: int) -> tuple[int, ...]:
        """The child ordinals on the path of a class, root first: 0 is left at a binary node."""
        return tuple(child for _, child in self.path(class_id))

    def average_depth(self, frequencies: npt.ArrayLike | None = None) -> float:
        """Inner nodes visited on average: sum_c f_c depth_c / sum_c f_c.

        Args:
            frequencies: real [V], finite, none negative, not all zero; None counts every class
                once.
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
        self, root: int = 1, leaf: int = 1, frequencies: npt.ArrayLike | None = None
    ) -> Tree:
        """A tree of the same leaf order whose top and whose small subtrees are single softmaxes.

        The root becomes one softmax over at most C = ``root`` clusters: beginning with the root's
        own children, the heaviest inner node among them is replaced by its children as long as
        there are at most C of them. Heaviest is by frequency mass, or by number of leaves without
        frequencies; ties go to more leaves, then to the left. A node with too many children stays
        as it is, and so does a root with more than C. Then every topmost subtree of at most G =
        ``leaf`` leaves becomes one softmax over its leaves.

        C = 1, G = 1 leaves the tree as it is; max(C, G) >= V gives the flat softmax.

        Args:
            root: C >= 1.
            leaf: G >= 1.
            frequencies: real [V], finite, none negative.
        """
        root = min(check_int("root", root, 1), self.n_classes)
        leaf = min(check_int("leaf", leaf, 1), self.n_classes)
        weight = None if frequencies is None else check_frequencies(frequencies, self.n_classes)
        if root <= 2 and leaf <= 2 and self.is_binary:
            return self
        return Tree._adopt(_host.collapse(*self._raw(), root, leaf, weight))

    # Other representations

    @classmethod
    def from_parents(cls, parent: npt.ArrayLike, leaf_class: npt.ArrayLike | None = None) -> Tree:
        """A tree given by the parent of every node, inner nodes and leaves alike.

        Nodes may be numbered in any way. A node that is nobody's parent is a leaf; any other needs
        two children or more, which stand from left to right in the order of their numbers.

        Args:
            parent: int [M + V], the parent of each node, -1 for the one root.
            leaf_class: int [M + V], the class of each leaf, -1 for inner nodes. None numbers the
                leaves: the class of a leaf is its rank among the leaves, so that where nodes 0 .. V
                    - 1 are the leaves, node c is
                class c.

        Raises:
            ValueError: no root or several, a cycle, an only child, classes that are no permutation,
                too deep.
        """
        parents = integer_array("parent", parent, np.int64)
        if leaf_class is None:
            return cls._adopt(_host.from_parents(parents, None))
        classes = integer_array("leaf_class", leaf_class, np.int64)
        if len(classes) != len(parents):
            raise ValueError(
                f"leaf_class: expected {len(parents)} entries, as many as parent, "
                f"got {len(classes)}"
            )
        return cls._adopt(_host.from_parents(parents, classes))

    def to_parents(self) -> tuple[Int64Array, Int64Array]:
        """(parent, leaf_class) as `from_parents` takes them, all nodes numbered in preorder."""
        return _host.to_parents(*self._raw())

    @classmethod
    def from_nested(cls, nested: Any) -> Tree:
        """A tree given as nested tuples (or lists) of class ids, such as ``((0, 1), (2, 3, 4))``.

        A tree of one class is the int 0.

        Raises:
            ValueError: a tuple of fewer than two entries, classes that are no permutation of 0 .. V
                - 1, too deep.
            TypeError: an entry that is neither an integer nor a tuple.
        """
        parent: list[int] = []
        leaf_class: list[int] = []
        where: list[str] = []

        def add(item: Any, above: int, name: str, depth: int) -> None:
            number = len(parent)
            parent.append(above)
            where.append(name)
            if not isinstance(item, (tuple, list)):
                leaf_class.append(check_int(name, item, 0, _host.MAX_CLASSES - 1))
                return
            leaf_class.append(-1)
            if len(item) < 2:
                raise ValueError(f"{name}: expected two entries or more, got {item!r}")
            if depth >= MAX_DEPTH:
                raise ValueError(
                    f"{name}: expected at most MAX_DEPTH = {MAX_DEPTH} tuples in each other"
                )
            for i, child in enumerate(item):
                add(child, number, f"{name}[{i}]", depth + 1)

        add(nested, -1, "nested", 0)
        n_classes = sum(c >= 0 for c in leaf_class)
        first: dict[int, str] = {}
        for c, name in zip(leaf_class, where, strict=True):
            if c >= n_classes:
                raise ValueError(f"{name}: expected a class from 0 to {n_classes - 1}, got {c}")
            if c in first:
                raise ValueError(f"{name}: class {c} appears twice (first at {first[c]})")
            if c >= 0:
                first[c] = name
        return cls.from_parents(parent, leaf_class)

    def to_nested(self) -> Nested:
        """The tree as nested tuples of class ids; an int for V = 1."""
        if self.n_nodes == 0:
            return 0
        edges = self.edges()
        built: dict[int, Nested] = {}
        child_node, begin = edges.child_node.tolist(), edges.begin.tolist()
        order, offset = self._order.tolist(), self._node_offset.tolist()
        for m in range(self.n_nodes - 1, -1, -1):
            children = range(offset[m] - m, offset[m + 1] - m - 1)
            built[m] = tuple(
                order[begin[e]] if child_node[e] < 0 else built.pop(child_node[e]) for e in children
            )
        return built[0]

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tree to a safetensors file.

        An existing file is replaced in one step or, on an error, left as it was.
        """
        data = safetensors_bytes(self.arrays(), metadata={"format": _FORMAT, "version": _VERSION})
        write_atomic(Path(path), data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tree:
        """Reads a tree that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is cut off, is no safetensors file, holds something else or an
                invalid tree.
        """
        path = Path(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file")
        if not path.is_file():
            raise ValueError(f"{path}: expected a file, got a folder or a device")
        try:
            with safe_open(path, framework="numpy") as file:
                metadata: Mapping[str, str] = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{path}: expected a tree saved by hstree, got a file that is cut off or is not "
                f"safetensors ({error})"
            ) from None
        if metadata.get("format") != _FORMAT:
            raise ValueError(
                f"{path}: expected a tree saved by hstree (format {_FORMAT!r}), "
                f"got format {metadata.get('format')!r}"
            )
        if metadata.get("version") != _VERSION:
            raise ValueError(
                f"{path}: expected version {_VERSION!r} of {_FORMAT}, "
                f"got {metadata.get('version')!r}"
            )
        wanted = {name: np.dtype(dtype) for name, dtype in _DTYPES.items()}
        found = {name: array.dtype for name, array in arrays.items()}
        if found != wanted:
            raise ValueError(f"{path}: expected arrays {wanted}, got {found}")
        try:
            return cls(**arrays)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    # Identity

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that depend on the three arrays alone, on every machine."""
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

    def __copy__(self) -> Tree:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tree:
        return self

    def __reduce__(self) -> tuple[type[Tree], tuple[Int32Array, Int64Array, Int32Array]]:
        return Tree, self._raw()

    def __repr__(self) -> str:
        if self.n_classes <= _REPR_CLASSES:
            return f"Tree.from_nested({self.to_nested()!r})"
        return (
            f"Tree(n_classes={self.n_classes}, n_binary={self.n_binary}, n_wide={self.n_wide}, "
            f"root_width={self.root_width}, height={self.height})"
        )
