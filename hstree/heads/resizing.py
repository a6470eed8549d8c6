"""Another number of classes for a head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree.heads.tables import Tables
from hstree.heads.tying import HasWeight

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class ClassChange:
    """A change of the number of classes, as :meth:`hstree.heads.Head.resize_classes` gets it.

    Attributes:
        old: number of classes before.
        new: number of classes after; classes 0 to min(old, new) - 1 stay.
        frequencies: class counts [new], all positive, or None.
        embedding: module whose weight [new, D] a tied head reads from now on, or None.
    """

    old: int
    new: int
    frequencies: npt.NDArray[np.float64] | None
    embedding: HasWeight | None

    @property
    def kept(self) -> int:
        return min(self.old, self.new)

    @property
    def added(self) -> int:
        return max(self.new - self.old, 0)

    def log_shares(self) -> Tensor | None:
        """Logarithms [added], float64, of the frequencies of the new classes relative to the sum
        of those of the old ones."""
        if self.frequencies is None:
            return None
        log_all = np.log(self.frequencies[: self.old].sum())
        return torch.from_numpy(np.log(self.frequencies[self.old :]) - log_all)

    def rows(self, values: Tensor) -> Tensor:
        """Values [new, ...] from [old, ...]: those of the new classes are the mean of the finite
        ones."""
        kept = values[: self.kept].clone()
        if not self.added:
            return kept
        known = values.double() if values.dtype == torch.float64 else values.float()
        mean = known.masked_fill(~known.isfinite(), torch.nan).nanmean(0).nan_to_num()
        return torch.cat([kept, mean.to(values.dtype).expand(self.added, *values.shape[1:])])

    def counts(self, known: npt.NDArray[np.float64] | None) -> npt.NDArray[np.float64] | None:
        """The given frequencies, or the known ones [old] with their geometric mean for the new
        classes, or None."""
        if self.frequencies is not None or known is None:
            return self.frequencies
        mean = np.exp(np.log(known).mean())
        return np.append(known[: self.kept], np.full(self.added, mean))

    def parameter(self, values: Tensor, old: nn.Parameter) -> nn.Parameter:
        """The values as a parameter that is trained if the old one is."""
        return nn.Parameter(values.to(old), requires_grad=old.requires_grad)


def copy_with_shared_tensors(module: _Module) -> _Module:
    """A copy of a module that has the parameters and buffers of the original.

    Raises:
        ValueError: for parameters on the meta device, sharded, or computed from others.
    """
    tensors = list(chain(module.parameters(), module.buffers()))
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("resized: expected a head with data, got one on the meta device")
    if any(hasattr(tensor, "device_mesh") for tensor in tensors):
        raise ValueError(
            "resized: expected a head with whole parameters, got DTensor; resize it before "
            "fully_shard"
        )
    for part in module.modules():
        tables = part.tables() if isinstance(part, Tables) else {}
        attributes = {name: value for name, value in vars(part).items() if name not in tables}
        computed = [name for name, value in attributes.items() if isinstance(value, Tensor)]
        computed += getattr(part, "parametrizations", {})
        if computed:
            raise ValueError(
                f"resized: expected a head whose parameters are its own, got a {computed[0]!r} "
                "that is computed from others; end its pruning or parametrization first "
                "(torch.nn.utils.prune.remove, parametrize.remove_parametrizations)"
            )
    return copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})


def copy_shared_tensors(module: nn.Module, original: nn.Module, tied: Tensor | None) -> None:
    """Replace the parameters and buffers that a module shares with the original by copies, except
    for the one that it is tied to."""
    shared = {id(tensor) for tensor in chain(original.parameters(), original.buffers())} - {
        id(tied)
    }
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and id(parameter) in shared:
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                part._parameters[name] = own
        for name, buffer in part._buffers.items():
            if buffer is not None and id(buffer) in shared:
                part._buffers[name] = buffer.clone()
