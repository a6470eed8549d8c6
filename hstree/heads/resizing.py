"""Another number of classes for a head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hstree._checks import check_int, smoothed_frequencies
from hstree.heads.tables import Tables
from hstree.heads.tying import HasWeight

if TYPE_CHECKING:
    from hstree.heads.base import Head

_Head = TypeVar("_Head", bound="Head")


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


def check_change(
    head: Head,
    num_classes: int,
    frequencies: npt.ArrayLike | None,
    embedding: HasWeight | None,
) -> ClassChange:
    """The change; raises ValueError for one that is impossible."""
    num_classes = check_int("num_classes", num_classes)
    if head.n_classes <= head.ignore_index < num_classes:
        raise ValueError(
            f"num_classes: expected at most {head.ignore_index}, the ignore_index of the head, "
            f"which would become a class, got {num_classes}"
        )
    if embedding is not None and not getattr(head, "tied", False):
        raise ValueError("embedding: expected None, since the head is not tied")
    tensors = list(chain(head.parameters(), head.buffers()))
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("resized: expected a head with data, got one on the meta device")
    if any(hasattr(tensor, "device_mesh") for tensor in tensors):
        raise ValueError(
            "resized: expected a head with whole parameters, got DTensor; resize it before "
            "fully_shard"
        )
    for module in head.modules():
        tables = module.tables() if isinstance(module, Tables) else {}
        attributes = {name: value for name, value in vars(module).items() if name not in tables}
        computed = [name for name, value in attributes.items() if isinstance(value, Tensor)]
        computed += getattr(module, "parametrizations", {})
        if computed:
            raise ValueError(
                f"resized: expected a head whose parameters are its own, got a {computed[0]!r} "
                "that is computed from others; end its pruning or parametrization first "
                "(torch.nn.utils.prune.remove, parametrize.remove_parametrizations)"
            )
    if frequencies is not None:
        frequencies = smoothed_frequencies(frequencies, num_classes)
    return ClassChange(head.n_classes, num_classes, frequencies, embedding)


@torch.no_grad()
def resized(head: _Head, change: ClassChange) -> _Head:
    """See :meth:`hstree.heads.Head.resized`. The tensors whose shapes change are not copied."""
    shared = {id(tensor): tensor for tensor in chain(head.parameters(), head.buffers())}
    made = copy.deepcopy(head, dict(shared))
    made.frequencies = change.counts(made.frequencies)
    made.resize_classes(change)
    made.n_classes = change.new
    if made.class_weight is not None:
        _set_constant(made, "class_weight", change.rows(made.class_weight))
    tied = None if change.embedding is None else change.embedding.weight
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in shared and parameter is not tied:
                own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                module._parameters[name] = own
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) in shared:
                module._buffers[name] = buffer.clone()
    return made


def _set_constant(module: Head, name: str, value: Tensor) -> None:
    """Replace a constant by one of another shape, on the same device."""
    device = module.get_buffer(name).device
    module.register_constant(name, value)
    module._buffers[name] = value.to(device)
