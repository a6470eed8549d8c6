"""Builds the CUDA sources for the CPU, and calls their launchers on numpy arrays.

The steps that the PyTorch binding does with torch (allocation, sort, cumulative sum) are done
here with numpy, in the sequence that csrc/kernels/path.h prescribes.
"""

from __future__ import annotations

import ctypes
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "kernels"
EMULATION = ROOT / "tests" / "cuda_emu"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")
ORDERS = (("ascending", 0), ("descending", 0), ("shuffled", 1), ("shuffled", 2))
NAN_BITS = 0x7FC0


def compile_emulated(folder: Path, sources: list[Path], options: tuple[str, ...] = ()) -> Path:
    """Compiles .cu and .cpp sources with g++ and the emulation header into one shared library."""
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-fno-strict-aliasing", *options]
    command += ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += [f"-I{KERNELS}", "-include", str(EMULATION / "cuda_emu.h")]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        run([*command, "-x", "c++", "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "emulated.so"
    run(["g++", "-shared", *options, *objects, "-o", str(library)])
    return library


def compile_kernels(folder: Path, options: tuple[str, ...] = ()) -> Path:
    """Compiles csrc/kernels and the C interface that `Kernels` calls."""
    sources = [*sorted(KERNELS.glob("*.cu")), EMULATION / "launchers.cpp"]
    return compile_emulated(folder, sources, options)


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")


class ElementType(NamedTuple):
    """An element type of the ops: how its arrays look, and how it rounds."""

    name: str
    number: int  # in hstree::ScalarType
    storage: type[Any]
    sums: type[Any]
    unit: float  # largest relative error of rounding
    tiny: float  # largest absolute error of rounding a subnormal number

    def encode(self, values: Array) -> Array:
        """Rounds to this type, to the nearest, ties to even."""
        if self.name != "bfloat16":
            return values.astype(self.storage)
        bits = values.astype(np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(NAN_BITS), rounded)

    def decode(self, stored: Array) -> Array:
        if self.name == "bfloat16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float64)

    def garbage(self, *shape: int) -> Array:
        """Uninitialised memory: every element is NaN."""
        return self.encode(np.full(shape, np.nan))


FLOAT32 = ElementType("float32", 0, np.float32, np.float32, 2.0**-24, 2.0**-150)
FLOAT64 = ElementType("float64", 1, np.float64, np.float64, 2.0**-53, 0.0)
BFLOAT16 = ElementType("bfloat16", 2, np.uint16, np.float32, 2.0**-8, 2.0**-134)
FLOAT16 = ElementType("float16", 3, np.float16, np.float32, 2.0**-11, 2.0**-25)
ELEMENT_TYPES = (FLOAT32, FLOAT64, BFLOAT16, FLOAT16)


class CTables(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("target", "offset", "path")),
        *((name, ctypes.c_void_p) for name in ("leaf_position", "feature_index", "tree_valid")),
        *((name, ctypes.c_int64) for name in ("rows", "classes", "entries")),
        *((name, ctypes.c_int64) for name in ("weight_rows", "in_features", "features")),
        *((name, ctypes.c_int) for name in ("trees", "stride")),
        ("wide", ctypes.c_bool),
    )


class CLeafOrder(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("order", "length", "shared", "row_length")
    )


class CForward(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("input", "weight", "bias", "log_prob", "score")
    )


class CBackward(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("grad_log_prob", "score", "input", "weight")
    )


class CFeatureGather(ctypes.Structure):
    _fields_ = (
        ("feature_index", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "in_features", "features")),
        ("trees", ctypes.c_int),
    )


class CLogitFunction(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("c", "k")),
        ("table", ctypes.c_void_p),
        ("intervals", ctypes.c_int64),
        ("width", ctypes.c_int),
        ("radius", ctypes.c_double),
    )


class CMonotoneSizes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "classes"))


class CMonotoneBackward(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("grad_log_prob", "target", "log_normalizer")
    )


class CSparseAdam(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("outer", "inner")),
        *((name, ctypes.c_int64) for name in ("outer_size", "inner_size", "visited", "features")),
        *((name, ctypes.c_void_p) for name in ("values", "weight", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_double) for name in ("step_size", "beta1", "beta2", "eps")),
        ("maximize", ctypes.c_bool),
    )


@dataclass(frozen=True)
class LogitFunction:
    """f of a logit, as hstree::LogitFunction; table [K, 2] or [K, 4], exact."""

    c: float = 0.0
    k: float = 1.0
    table: Array | None = None
    radius: float = 1.0

    def stored(self, kind: ElementType) -> tuple[CLogitFunction, Array | None]:
        """What the launchers take, and the array that it points into."""
        table = None if self.table is None else self.table.astype(kind.sums)
        intervals, width = (0, 0) if table is None else table.shape
        address = pointer(table)
        return CLogitFunction(self.c, self.k, address, intervals, width, self.radius), table


@dataclass
class Tables:
    """The tables of a batch; shapes as in hstree::Tables."""

    target: Array
    offset: Array
    path: Array
    leaf_position: Array
    feature_index: Array | None
    weight_rows: int
    in_features: int
    stride: int

    @property
    def wide(self) -> bool:
        return self.path.ndim == 2

    @property
    def trees(self) -> int:
        return len(self.offset)

    @property
    def rows(self) -> int:
        return len(self.target)

    @property
    def features(self) -> int:
        return self.in_features if self.feature_index is None else self.feature_index.shape[1]


class SparseGradients(NamedTuple):
    place: Array  # [2, nnz], tree and weight row
    weight: Array
    bias: Array


def pointer(array: Array | None) -> int | None:
    if array is None:
        return None
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


class Kernels:
    """The launchers of an emulated library."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))
        self.library.emu_workspace_bytes.restype = ctypes.c_int64
        self.library.emu_sizes.restype = ctypes.c_int64
        self.library.emu_plif_workspace_bytes.restype = ctypes.c_int64
        self.library.emu_monotone_workspace_bytes.restype = ctypes.c_int64
        mirrors = (CTables, CLeafOrder, CForward, CBackward, CFeatureGather)
        mirrors = (*mirrors, CLogitFunction, CMonotoneSizes, CMonotoneBackward, CSparseAdam)
        for index, mirror in enumerate(mirrors):
            assert self.library.emu_sizes(index) == ctypes.sizeof(mirror), mirror.__name__

    def set_order(self, order: str, seed: int) -> None:
        """Which thread and block goes first from now on."""
        self.library.emu_order(("ascending", "descending", "shuffled").index(order), seed)

    def call(self, name: str, *arguments: object) -> None:
        function = self.library[f"emu_{name}"]
        function.restype = ctypes.c_char_p
        converted = [
            ctypes.byref(value)
            if isinstance(value, ctypes.Structure)
            else ctypes.c_void_p(pointer(value))
            if value is None or isinstance(value, np.ndarray)
            else value
            for value in arguments
        ]
        error = function(*converted)
        if error is not None:
            raise RuntimeError(error.decode())

    def plan(self, tables: Tables) -> Plan:
        return Plan(self, tables)

    def feature_gather(self, kind: ElementType, values: Array, feature_index: Array) -> Array:
        trees, features = feature_index.shape
        rows, in_features = values.shape
        sizes = CFeatureGather(pointer(feature_index), rows, in_features, features, trees)
        output = kind.garbage(rows, trees, features)
        self.call("feature_gather", kind.number, sizes, values, output)
        return output

    def feature_gather_backward(
        self, kind: ElementType, grad: Array, feature_index: Array, in_features: int
    ) -> Array:
        trees, features = feature_index.shape
        sizes = CFeatureGather(pointer(feature_index), grad.shape[0], in_features, features, trees)
        inverse = np.full((trees, in_features), 12345, np.int32)
        grad_input = kind.garbage(grad.shape[0], in_features)
        self.call("feature_gather_backward", kind.number, sizes, grad, inverse, grad_input)
        return grad_input

    def plif(self, kind: ElementType, function: LogitFunction, values: Array) -> Array:
        c_function, _table = function.stored(kind)
        output = kind.garbage(*values.shape)
        self.call("plif", kind.number, c_function, ctypes.c_int64(values.size), values, output)
        return output

    def plif_backward(
        self, kind: ElementType, function: LogitFunction, grad: Array, values: Array
    ) -> tuple[Array, Array]:
        c_function, table = function.stored(kind)
        assert table is not None
        size = self.library.emu_plif_workspace_bytes(ctypes.byref(c_function))
        workspace = np.zeros(size // 8, np.uint64)
        grad_input = kind.garbage(*values.shape)
        grad_table = np.full_like(table, np.nan if values.size else 0)
        arguments = (kind.number, c_function, ctypes.c_int64(values.size), grad, values)
        self.call("plif_backward", *arguments, workspace, grad_input, grad_table)
        return grad_input, grad_table

    def sparse_adam_(
        self,
        kind: ElementType,
        tensors: tuple[Array, Array, Array],
        index: Array,
        values: Array,
        rule: tuple[float, float, float, float],
        maximize: bool = False,
    ) -> None:
        """In place in weight, exp_avg and exp_avg_sq; the rule is step_size, beta1, beta2, eps."""
        outer = pointer(index[0]) if len(index) == 2 else None
        sizes = (1, *tensors[0].shape)[-3:] if outer is None else tensors[0].shape
        arguments = (outer, pointer(index[-1]), sizes[0], sizes[1], index.shape[1], sizes[2])
        addresses = (pointer(array) for array in (values, *tensors))
        self.call("sparse_adam", kind.number, CSparseAdam(*arguments, *addresses, *rule, maximize))

    def monotone_log_prob(
        self, kind: ElementType, function: LogitFunction, logits: Array, target: Array
    ) -> tuple[Array, Array]:
        c_function, _table = function.stored(kind)
        sizes = CMonotoneSizes(*logits.shape)
        log_prob, log_normalizer = kind.garbage(len(logits)), kind.garbage(len(logits))
        arguments = (kind.number, c_function, sizes, logits, target)
        self.call("monotone_log_prob", *arguments, log_prob, log_normalizer)
        return log_prob, log_normalizer

    def monotone_log_prob_backward_(
        self,
        kind: ElementType,
        function: LogitFunction,
        logits: Array,
        grad_log_prob: Array,
        target: Array,
        log_normalizer: Array,
        table_gradient: bool = True,
    ) -> Array | None:
        """Replaces the logits by their gradient; returns that of the table if it is wanted."""
        c_function, table = function.stored(kind)
        size = self.library.emu_monotone_workspace_bytes(ctypes.byref(c_function))
        workspace = grad_table = None
        if table is not None and table_gradient:
            workspace = np.zeros(size // 8, np.uint64)
            grad_table = np.full(table.shape, np.nan if len(logits) else 0.0)
        tensors = CMonotoneBackward(*(pointer(a) for a in (grad_log_prob, target, log_normalizer)))
        arguments = (kind.number, c_function, CMonotoneSizes(*logits.shape), tensors)
        self.call("monotone_log_prob_backward", *arguments, logits, workspace, grad_table)
        return grad_table


class Plan:
    """Steps 1 to 4 of path.h, and after them the ops on the batch."""

    def __init__(self, kernels: Kernels, tables: Tables) -> None:
        self.kernels = kernels
        self.tables = tables
        self.op = "wide" if tables.wide else "path"
        trees, rows = tables.trees, tables.rows
        self.c_tables = CTables(
            *(pointer(a) for a in (tables.target, tables.offset, tables.path)),
            *(pointer(a) for a in (tables.leaf_position, tables.feature_index)),
            None,
            rows,
            tables.leaf_position.shape[1],
            tables.path.shape[0],
            tables.weight_rows,
            tables.in_features,
            tables.features,
            trees,
            tables.stride,
            tables.wide,
        )
        if tables.feature_index is not None:
            self.tree_valid = np.full(trees, -7, np.int32)
            kernels.call("check_features", self.c_tables, self.tree_valid)
            self.c_tables.tree_valid = pointer(self.tree_valid)
        self.key = np.full((trees, rows), -7, np.int32)
        self.row_length = np.full((trees, rows), -7, np.int32)
        kernels.call("leaf_key", self.c_tables, self.key, self.row_length)
        self.order = np.ascontiguousarray(np.argsort(self.key, axis=1, kind="stable"))
        self.length = np.full((trees, rows), -7, np.int32)
        self.shared = np.full((trees, rows), -7, np.int32)
        count = np.full(trees * rows + 1, 0, np.int64)
        outputs = (self.length, self.shared, count)
        kernels.call("leaf_plan", self.c_tables, self.order, self.row_length, *outputs)
        self.slot = np.cumsum(count)
        arrays = (self.order, self.length, self.shared, self.row_length)
        self.c_order = CLeafOrder(*(pointer(a) for a in arrays))

    def forward(
        self, kind: ElementType, values: Array, weight: Array, bias: Array | None
    ) -> tuple[Array, Array]:
        tables = self.tables
        log_prob = np.full((tables.rows, tables.trees), np.nan, kind.sums)
        score = np.full((tables.rows, tables.trees, tables.stride), np.nan, kind.sums)
        tensors = CForward(*(pointer(a) for a in (values, weight, bias, log_prob, score)))
        name = f"{self.op}_forward"
        self.kernels.call(name, kind.number, self.c_tables, self.c_order, tensors)
        return log_prob, score

    def grad_input(self, kind: ElementType, grad: Array, score: Array, weight: Array) -> Array:
        shape = (self.tables.rows, self.tables.in_features)
        tensors = CBackward(pointer(grad), pointer(score), None, pointer(weight))
        name = f"{self.op}_backward_input"
        arguments = (kind.number, self.c_tables, self.c_order, tensors)
        output = kind.garbage(*shape)
        if self.tables.wide:
            sums = np.zeros(shape, kind.sums)
            output = sums if kind.storage == kind.sums else output
            arguments = (*arguments, sums)
        self.kernels.call(name, *arguments, output)
        return output

    def _grad_weight(
        self,
        kind: ElementType,
        slot: Array | None,
        tensors: CBackward,
        weight: Array,
        bias: Array | None,
    ) -> None:
        size = self.kernels.library.emu_workspace_bytes(kind.number, ctypes.byref(self.c_tables))
        workspace = np.full(size, 0xFF, np.uint8)
        name = f"{self.op}_backward_weight"
        arguments = (kind.number, self.c_tables, self.c_order, slot, tensors)
        self.kernels.call(name, *arguments, workspace, weight, bias)

    def dense(
        self, kind: ElementType, grad: Array, score: Array, values: Array
    ) -> tuple[Array, Array]:
        tables = self.tables
        tensors = CBackward(pointer(grad), pointer(score), pointer(values), None)
        shape = (tables.trees, tables.weight_rows)
        weight = np.zeros((*shape, tables.features), kind.storage)
        bias = np.zeros(shape, kind.storage)
        self._grad_weight(kind, None, tensors, weight, bias)
        return weight, bias

    def sparse(
        self, kind: ElementType, grad: Array, score: Array, values: Array
    ) -> SparseGradients:
        tensors = CBackward(pointer(grad), pointer(score), pointer(values), None)
        nnz = int(self.slot[-1])
        weight = kind.garbage(nnz, self.tables.features)
        bias = kind.garbage(nnz)
        self._grad_weight(kind, self.slot, tensors, weight, bias)
        index = np.full((2, nnz), -7, np.int64)
        arguments = (self.c_tables, self.c_order, self.slot, ctypes.c_int64(nnz), index)
        self.kernels.call("slot_index", *arguments)
        return SparseGradients(index, weight, bias)
