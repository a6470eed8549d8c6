"""The CUDA operators on numpy arrays, under the emulator.

The references of these tests are numpy's, in float64 or long double; bfloat16 is kept in uint16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from cuda_emu.library import CUDA, EmulatedLibrary
from torch import Tensor

Array = npt.NDArray[Any]

NAN_BITS = 0x7FC0


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


@dataclass(frozen=True)
class LogitFunction:
    """f of a logit; table [K, 2] or [K, 4], exact."""

    c: float = 0.0
    k: float = 1.0
    table: Array | None = None
    radius: float = 1.0

    def stored(self, kind: ElementType) -> Tensor | None:
        return None if self.table is None else torch.from_numpy(self.table.astype(kind.sums))

    def arguments(self, kind: ElementType) -> tuple[float, float, Tensor | None, float]:
        return self.c, self.k, self.stored(kind), self.radius


@dataclass
class Tables:
    """The tables of a batch; shapes as in `hstree.ops.path_log_prob`."""

    target: Array
    offset: Array
    path: Array
    leaf_position: Array
    feature_index: Array | None
    weight_rows: int
    in_features: int
    stride: int
    leaf_class: Array | None = None  # of the leaf op

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


def to_tensor(kind: ElementType, array: Array) -> Tensor:
    """The same memory as a tensor."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind.name == "bfloat16" else tensor


def to_array(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


@contextmanager
def filled_memory() -> Iterator[None]:
    """What the operators allocate is NaN, or the largest integer, until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(name: str, *arguments: Any) -> Any:
    """An operator of the library by its kernel for CUDA."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    with filled_memory():
        return getattr(torch.ops.hstree, name).default.redispatch(CUDA, *arguments)


class Kernels:
    """The operators of an emulated library."""

    def __init__(self, library: EmulatedLibrary) -> None:
        self.library = library

    def set_order(self, order: str, seed: int) -> None:
        """Which thread and block goes first from now on."""
        self.library.set_order(order, seed)

    def feature_gather(self, kind: ElementType, values: Array, feature_index: Array) -> Array:
        return to_array(
            call("feature_gather", to_tensor(kind, values), torch.from_numpy(feature_index))
        )

    def feature_gather_backward(
        self, kind: ElementType, grad: Array, feature_index: Array, in_features: int
    ) -> Array:
        index = torch.from_numpy(feature_index)
        return to_array(call("feature_gather_backward", to_tensor(kind, grad), index, in_features))

    def piecewise(self, kind: ElementType, function: LogitFunction, values: Array) -> Array:
        table = function.stored(kind)
        return to_array(call("piecewise", to_tensor(kind, values), table, function.radius))

    def piecewise_backward(
        self, kind: ElementType, function: LogitFunction, grad: Array, values: Array
    ) -> tuple[Array, Array]:
        tensors = (to_tensor(kind, grad), to_tensor(kind, values), function.stored(kind))
        grad_input, grad_table = call("piecewise_backward", *tensors, function.radius)
        return to_array(grad_input), to_array(grad_table)

    def sparse_adam_(
        self,
        kind: ElementType,
        tensors: tuple[Array, Array, Array],
        index: Array,
        values: Array,
        rule: tuple[float, float, float, float, float],
        maximize: bool = False,
    ) -> None:
        """The first step, in place in weight, exp_avg and exp_avg_sq; the rule is lr, beta1, beta2,
        eps, weight_decay."""
        weight, exp_avg, exp_avg_sq = tensors
        state = (to_tensor(kind, weight), torch.from_numpy(exp_avg), torch.from_numpy(exp_avg_sq))
        gradient = (torch.from_numpy(index), to_tensor(kind, values))
        call("sparse_adam_", *state, *gradient, 1, *rule, maximize)

    def target_log_softmax(
        self, kind: ElementType, function: LogitFunction, logits: Array, target: Array
    ) -> tuple[Array, Array]:
        tensors = (to_tensor(kind, logits), torch.from_numpy(target))
        log_prob, log_normalizer = call("target_log_softmax", *tensors, *function.arguments(kind))
        return to_array(log_prob), to_array(log_normalizer)

    def target_log_softmax_backward_(
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
        wanted = function.table is not None and table_gradient
        grad_table = call(
            "target_log_softmax_backward_",
            *(to_tensor(kind, array) for array in (logits, grad_log_prob)),
            torch.from_numpy(target),
            to_tensor(kind, log_normalizer),
            *function.arguments(kind),
            wanted,
        )
        return to_array(grad_table) if wanted else None


class TreeOp:
    """The path op, the wide op or the leaf op on a batch of tables."""

    def __init__(self, kind: ElementType, tables: Tables) -> None:
        self.kind = kind
        self.tables = tables
        self.shared = tables.leaf_class is not None
        kind_of_tree = "leaf" if self.shared else "wide" if tables.wide else "path"
        self.name = f"{kind_of_tree}_log_prob"
        arrays = (tables.target, tables.offset, tables.path, tables.leaf_position)
        index = tables.leaf_class if self.shared else tables.feature_index
        self.table_tensors = (
            *(torch.from_numpy(array) for array in arrays),
            None if index is None else torch.from_numpy(index),
        )

    def forward(self, values: Array, weight: Array, bias: Array | None) -> tuple[Array, Array]:
        """log_prob and score; what backward takes over stays here."""
        tensors = (None if a is None else to_tensor(self.kind, a) for a in (values, weight, bias))
        outputs = call(self.name, *tensors, *self.table_tensors, self.tables.stride)
        log_prob, score, *self.kept = outputs
        return to_array(log_prob), to_array(score)

    def backward(
        self, sparse: bool, grad: Array, values: Array, weight: Array, score: Array
    ) -> list[Array]:
        """Gradients of hidden, weight and bias; if sparse, the index of the last two before each of
        them."""
        tensors = (to_tensor(self.kind, array) for array in (values, weight))
        scores = torch.from_numpy(score)
        outputs = call(
            f"{self.name}_backward",
            *(torch.from_numpy(grad), *tensors, *self.table_tensors, scores, *self.kept),
            *([True] * 3, sparse),
        )
        of_hidden, of_weight, of_bias, index, bias_index = map(to_array, outputs)
        if not sparse:
            return [of_hidden, of_weight, of_bias]
        return [of_hidden, index, of_weight, bias_index if self.shared else index, of_bias]
