"""The arrays of a tree, and what follows from them: sizes, tables, masses and identity."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hstree import _host
from hstree._checks import check_frequencies, check_int_array
from hstree.trees.tables import Int32Array, Int64Array, TreeEdges, TreeTables

if TYPE_CHECKING:
    from typing_extensions import Self


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


class TreeArrays:
    """The representation of :class:`hstree.trees.Tree`, which describes it."""

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
            check_int_array("order", order, np.int32),
            check_int_array("node_offset", node_offset, np.int64),
            check_int_array("boundary", boundary, np.int32),
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
    def n_leaves(self) -> int:
        """The number of leaves, V."""
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

    def tables(self) -> TreeTables:
        """The tables that the kernels read; computed once and kept."""
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
        if not isinstance(other, TreeArrays):
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
