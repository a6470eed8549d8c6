import numpy as np
import numpy.typing as npt

_I32 = npt.NDArray[np.int32]
_I64 = npt.NDArray[np.int64]
_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_Arrays = tuple[_I32, _I64, _I32]

MAX_DEPTH: int
MAX_CLASSES: int

def validate(order: _I32, node_offset: _I64, boundary: _I32, /) -> None: ...
def class_depth(order: _I32, node_offset: _I64, boundary: _I32, /) -> _I32: ...
def edges(
    order: _I32, node_offset: _I64, boundary: _I32, /
) -> tuple[_I32, _I32, _I32, _I32, _I32, _I32, _I32]: ...
def table_sizes(
    order: _I32, node_offset: _I64, boundary: _I32, groups: bool, /
) -> tuple[int, int, int, int, int]: ...
def write_tables(
    order: _I32,
    node_offset: _I64,
    boundary: _I32,
    groups: bool,
    *,
    path_begin: int = 0,
    leaf_position: _I32 | None = None,
    root_child: _I32 | None = None,
    path_offset: _I64 | None = None,
    path: _I32 | None = None,
    node: _I32 | None = None,
    edge: _I32 | None = None,
    leaf_edge: _I32 | None = None,
) -> None: ...
def edge_masses(order: _I32, node_offset: _I64, boundary: _I32, frequencies: _F64, /) -> _F64: ...
def collapse(
    order: _I32,
    node_offset: _I64,
    boundary: _I32,
    clusters: int,
    binary: bool,
    max_group: int,
    frequencies: _F64 | None,
    /,
) -> _Arrays: ...
def to_parents(order: _I32, node_offset: _I64, boundary: _I32, /) -> tuple[_I64, _I64]: ...
def from_parents(parent: _I64, leaf_class: _I64 | None, /) -> _Arrays: ...
def random_tree(n_classes: int, seed: int, /) -> _Arrays: ...
def huffman_tree(frequencies: _F64, seed: int, /) -> _Arrays: ...
def cluster_tree(
    vectors: _F32,
    frequencies: _F64 | None,
    seed: int,
    noise: float,
    iterations: int,
    max_depth: int,
    /,
) -> _Arrays: ...
