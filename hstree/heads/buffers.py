"""Values that a head gets from its arguments and not from training: kept on the host, so that they
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
    """Copy values into a parameter or buffer of any device and dtype; of a DTensor each process
    fills its part."""
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.require(values, requirements="W"))
    values = values.to(tensor.device, tensor.dtype)
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    if mesh is not None:
        from torch.distributed.tensor import distribute_tensor

        values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    tensor.copy_(values)


class Tables(nn.Module, ABC):
    """Buffers that can be made at any time from what the module keeps on the host.

    They are made when the module is, on the default device or, where that is the meta device, on
    the CPU; and again whenever ``to``, ``to_empty`` and the like put new tensors in their place.
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
        """Make all tables again, on the device where they are."""
        for name, table in self.tables().items():
            fill(self.get_buffer(name), table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if any(self._buffers[name] is not table for name, table in before.items()):
            self.rebuild()
        return self


class Resettable(nn.Module):
    """A module that can be set back to what its constructor made."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: dict[str, Tensor] = {}

    def register_constant(self, name: str, value: Tensor | None) -> None:
        """A buffer that an argument of the constructor decides about, saved with the head:
        :meth:`reset_parameters` restores it."""
        if value is not None:
            self._constants[name] = value.detach().cpu().clone()
            value = value.to(torch.get_default_device())
        self.register_buffer(name, value)

    def reset_parameters(self) -> None:
        """Everything in the state as the constructor sets it; random numbers are drawn anew. A head
        with parameters adds them to what this method of its base sets.

        After ``to_empty``, for a head that was made on the meta device. Sharded parameters
        (DTensor) are set too. A tied embedding is left as it is. A loaded head begins without the
        class frequencies that it was made with, which are not saved.

        Example:
            >>> with torch.device("meta"):
            ...     head = hstree.Softmax(400, 10000)
            >>> head.to_empty(device="cuda").reset_parameters()
        """
        for name, value in self._constants.items():
            fill(self.get_buffer(name), value)
