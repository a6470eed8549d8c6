"""The CUDA operators on numpy arrays, under the emulator.

The references of these tests are numpy's, in float64 or long double; bfloat16 is kept in uint16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from cuda_emu.library import CUDA, EmulatedLibrary
from ops.bounds import Array
from ops.cases import filled_memory
from torch import Tensor

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


def unit_of_sums(kind: ElementType) -> float:
    return 2.0**-53 if kind is FLOAT64 else 2.0**-24


def to_tensor(kind: ElementType, array: Array) -> Tensor:
    """The same memory as a tensor."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if kind.name == "bfloat16" else tensor


def to_array(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def call(name: str, *arguments: Any) -> Any:
    """An operator of the library by its kernel for CUDA."""
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
