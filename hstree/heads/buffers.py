"""Values that a head gets from its arguments, not from training: kept on the host, so that they
survive the meta device and ``to_empty``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Self


@torch.no_grad()
def fill(tensor: Tensor, values: Tensor | npt.NDArray[Any]) -> None:
    """Copy values into a parameter or buffer of any device and dtype. Each process fills its part
    of a DTensor."""
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.require(values, requirements="W"))
    values = values.to(tensor.device, tensor.dtype)
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    tensor.copy_(values)


class Tables(nn.Module, ABC):
    """Buffers that can be rebuilt at any time from arrays that the module keeps on the host.

    They are built with the module, on the default device, or on the CPU if that is the meta device.
    They are rebuilt whenever ``to``, ``to_empty`` or a similar method replaces them.
    """

    @abstractmethod
    def tables(self) -> Mapping[str, npt.NDArray[Any]]:
        """The tables by name."""

    def register_tables(self, persistent: bool) -> None:
        device = torch.get_default_device()
        device = torch.device("cpu") if device.type == "meta" else device
        for name, table in self.tables().items():
            self.register_buffer(name, torch.tensor(table, device=device), persistent=persistent)

    def rebuild(self) -> None:
        """Rebuild all tables on their present device."""
        for name, table in self.tables().items():
            fill(self.get_buffer(name), table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if any(self._buffers[name] is not table for name, table in before.items()):
            self.rebuild()
        return self


class Resettable(nn.Module):
    """A module that can be reset to the state its constructor made."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[str, Tensor] = {}

    def register_constant(self, name: str, value: Tensor | None) -> None:
        """Register a buffer whose value comes from an argument of the constructor. It is saved with
        the head, and :meth:`reset_parameters` restores it."""
        if value is not None:
            self._constants[name] = value.detach().cpu().clone()
            value = value.to(torch.get_default_device())
        self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Reset the whole state to what the constructor sets; random values are drawn again.

        Call it after ``to_empty`` on a head that was made on the meta device. Sharded parameters
        (DTensor) are reset too. A tied embedding is not changed. A loaded head is reset without
        the class frequencies it was built with, because they are not saved.

        Example:
            >>> import torch, hstree
            >>> with torch.device("meta"):
            ...     head = hstree.Softmax(400, 10000)
            >>> _ = head.to_empty(device="cpu")  # or "cuda"
            >>> head.reset_parameters()
            >>> head.bias.abs().max()
            tensor(0., grad_fn=<MaxBackward1>)
        """
        for name, value in self._constants.items():
            fill(self.get_buffer(name), value)
