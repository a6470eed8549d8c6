"""The part of a head's state that is not its own parameters: tables, and a weight that belongs to
another module."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save as bytes_of_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from hstree._files import write_atomic

if TYPE_CHECKING:
    from typing_extensions import Self

METADATA_KEY = "hstree.head"
"""Key of the name and configuration of a head in the metadata of its file."""

EXTRA_STATE = "_extra_state"
"""Key of the tables in a state dict, from :meth:`torch.nn.Module.get_extra_state`."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes of tables by their names in safetensors."""


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor | npt.NDArray[Any]) -> None:
    """Copy values, broadcast, into a parameter or buffer of any device and dtype. Each process
    fills its part of a DTensor."""
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.require(values, requirements="W"))
    values = values.to(tensor.device, tensor.dtype)
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        values = values.expand(tensor.shape)
        values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    tensor.copy_(values)


class Tables(nn.Module):
    """A module with tables: what it gets from its arguments, not from training, as attributes that
    never change.

    They are no buffers, so whatever averages, casts, broadcasts or empties all parameters and
    buffers leaves them as they are. They are built with the module, on the default device, or on
    the CPU if that is the meta device, and move with it by ``to`` and similar methods. FSDP and
    accelerate move parameters and buffers one by one: :meth:`place_tables` follows them.

    Tables identify a head and are saved with it, as one entry of the state dict: a safetensors file
    as a tensor of bytes, uint8, a copy, so that changes of it leave the head as it is. Casts of all
    entries of a state dict keep these numbers, and so do averages, but for rounding.
    """

    tables_device: torch.device

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._own_tables: dict[str, Tensor] = {}
        device = torch.get_default_device()
        self._set_device(torch.device("cpu") if device.type == "meta" else device)

    def tables(self) -> dict[str, Tensor]:
        """The tables by name, on the CPU."""
        return dict(self._own_tables)

    def saved_items(self) -> Iterator[tuple[str, Tensor]]:
        """All that is saved: names and tables on the CPU, one after the other, because copies of
        all of them may be larger than the module."""
        yield from self._own_tables.items()

    def register_table(self, name: str, values: Tensor) -> None:
        """Add or replace a table."""
        self._own_tables[name] = values.detach().cpu().clone(memory_format=torch.contiguous_format)
        setattr(self, name, self._own_tables[name].to(self.tables_device))

    def check_tables(self) -> None:
        """Raises ValueError for tables from a file with values that the module never has."""

    def set_tables(self, device: torch.device) -> None:
        """Set the attributes to ``tables()`` on this device."""
        for name, table in self.tables().items():
            setattr(self, name, table.to(device))
        self._set_device(device)  # last, because another thread may ask for it

    def place_tables(self, device: torch.device) -> None:
        """Move the tables to a device."""
        if self.tables_device != device:
            self.set_tables(device)

    def _set_device(self, device: torch.device) -> None:
        self.tables_device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Where fn puts a tensor. Tables keep their dtype, and their values if it is to_empty.
        self.place_tables(fn(torch.zeros(1, dtype=torch.int32, device=self.tables_device)).device)
        return self

    def get_extra_state(self) -> Tensor:
        content = bytearray(bytes_of_tensors(dict(self.saved_items())))
        return torch.frombuffer(content, dtype=torch.uint8).clone()  # aligned

    def set_extra_state(self, state: Any) -> None:
        other = unpacked(state)
        differ = [
            name
            for name, own in self.saved_items()
            if name not in other or not torch.equal(own, other.pop(name))
        ]
        differ = sorted({*differ, *other})
        if differ:
            names = ", ".join(differ[:4]) + ", ..." * (len(differ) > 4)
            raise ValueError(
                f"state dict: expected the tables of this head, got others ({names}): the weights "
                "belong to a head with other trees, feature subsets or order of the classes. Build "
                "the head with the arguments that it was saved with; hstree.load_head does so for "
                "files of head.save"
            )


def unpacked(state: Any) -> dict[str, Tensor]:
    """The saved tables in an entry of a state dict. They share its memory.

    Raises:
        ValueError: if it does not hold tables.
    """
    try:
        if not isinstance(state, Tensor) or state.dim() != 1:
            raise ValueError(f"expected a tensor of bytes, got {_what(state)}")
        content = state.detach().cpu()
        if content.dtype != torch.uint8:
            content = content.round().to(torch.uint8)
        return dict(_parts(content))
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{EXTRA_STATE}: expected the tables of a head as bytes, got {_what(state)} with other "
            "values: the tables were changed. Something that treats all entries of a state dict as "
            f"weights, such as a moving average, must leave out {EXTRA_STATE}"
        ) from error


def _parts(content: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file, whose bytes are uint8 [B], without copies: the
    length of the header (8 bytes, the lowest first), the header (JSON), and the data."""
    length = int.from_bytes(content[:8].numpy().tobytes(), "little")
    header = json.loads(content[8 : 8 + length].numpy().tobytes())
    data = content[8 + length :]
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"{name}: expected bytes within {len(data)}, got {begin} to {end}")
        part, dtype = data[begin:end], DTYPES[entry["dtype"]]
        if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
            part = part.clone()
        yield name, part.view(dtype).view(entry["shape"])


def saved_tables(tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The saved tables of a module in the state dict of a head, whose keys begin with ``prefix``
    there."""
    return unpacked(tensors[f"{prefix}{EXTRA_STATE}"])


def adopt_tables(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Give a module, if it has tables, the saved ones of its registered tables.

    Raises:
        ValueError: if one is missing, has another shape or dtype, or a value out of range.
    """
    if not isinstance(module, Tables):
        return
    saved = saved_tables(tensors, prefix)
    for name, own in list(module._own_tables.items()):
        other = saved.get(name)
        if other is None or other.shape != own.shape or other.dtype != own.dtype:
            raise ValueError(
                f"{name}: expected a table {_what(own)} for this configuration, got {_what(other)}"
            )
        module.register_table(name, other)
    module.check_tables()


def _what(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"of {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


class TyingError(ValueError):
    """A head cannot be tied to an embedding. Its message begins with ``embedding:``.

    Attributes:
        expected: shape of the weight that the head reads, if that of the embedding is another.
    """

    def __init__(self, message: str, expected: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.expected = expected


class HasWeight(Protocol):
    """A module whose weight [V, D] a head can read as its own, such as :class:`torch.nn.Embedding`,
    :class:`torch.nn.Linear` and :class:`hstree.Softmax`."""

    @property
    def weight(self) -> Tensor: ...


def weight_to_tie(embedding: HasWeight, n_classes: int, in_features: int) -> Tensor:
    """The weight of ``embedding``.

    Raises:
        ValueError: if it is not a tensor [n_classes, in_features].
    """
    weight, expected = getattr(embedding, "weight", None), (n_classes, in_features)
    if not isinstance(weight, Tensor):
        raise TyingError(
            f"embedding: expected a module with a weight {expected} to tie to, got "
            f"{type(embedding).__name__}"
        )
    if tuple(weight.shape) != expected:
        raise TyingError(
            f"embedding: expected a weight of shape {expected} to tie to, "
            f"got {tuple(weight.shape)}",
            expected,
        )
    return weight


def tied_names(head: nn.Module, embedding: HasWeight) -> list[str]:
    """Names of the parameters of the head that are the weight of ``embedding``."""
    weight = embedding.weight
    return [name for name, parameter in head.named_parameters() if parameter is weight]


def save_head(head: Any, path: str | os.PathLike[str], embedding: HasWeight | None) -> None:
    """See :meth:`hstree.heads.Head.save`."""
    left_out = [] if embedding is None else tied_names(head, embedding)
    if embedding is not None and not left_out:
        raise TyingError(
            "embedding: expected the module to whose weight the head is tied, got a "
            f"{type(embedding).__name__} with another weight"
        )
    tensors = {
        name: value.detach().contiguous().cpu()
        for name, value in head.state_dict().items()
        if name not in left_out
    }
    metadata = {METADATA_KEY: json.dumps({"name": head.name, "config": head.config()})}
    write_atomic(Path(path), lambda part: save_file(tensors, part, metadata))
