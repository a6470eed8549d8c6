"""Averaging of row-sparse gradients over processes."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from hstree.heads import Head
from hstree.heads.tables import EXTRA_STATE, Tables
from hstree.optim.rows import summed_rows

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def row_sparse_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters with row-sparse gradients, each once: those of heads and embeddings with
    ``sparse=True``."""
    found: dict[int, nn.Parameter] = {}
    for part in module.modules():
        own: list[nn.Parameter] = []
        if isinstance(part, Head):
            own = part.sparse_parameters()
        elif isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse:
            own = [part.weight]  # type: ignore[list-item]
        found |= {id(parameter): parameter for parameter in own if parameter.requires_grad}
    return list(found.values())


class RowAveraging:
    """Averages the gradients of some parameters over processes, at the end of each backward pass
    that reaches one of them.

    All communication happens there and in the order of the parameters. It is therefore the same on
    all ranks for any order of their backward passes, and follows that of DistributedDataParallel.
    Averaging gradients that are equal on all ranks does not change them, so gradients can be
    accumulated.

    Args:
        parameters: the parameters, on one device, the same on all ranks.
        groups: process groups over which the mean is taken, one after the other: one for each
            dimension of a device mesh.

    Attributes:
        enabled: whether backward passes average.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[ProcessGroup | None]
    ) -> None:
        if any(parameter.is_meta for parameter in parameters):
            raise ValueError(
                "module: expected row-sparse parameters with data, got some on the meta device; "
                "give them data first (to_empty, load_state_dict), or build the head with "
                "sparse=False"
            )
        self.parameters, self.groups = list(parameters), list(groups)
        self.enabled, self._reached = True, False
        queue = weakref.WeakMethod(self._queue)  # the parameters may outlive this object

        def hook(parameter: Tensor) -> None:
            if (method := queue()) is not None:
                method(parameter)

        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def broadcast(self) -> None:
        """Overwrite the parameters with those of the first rank."""
        for group in self.groups:
            for parameter in self.parameters:
                dist.broadcast(parameter, group=group, group_src=0)

    def watch(self, output: Any) -> None:
        """Average also after backward passes through this output of a model, because some ranks may
        reach none of the parameters."""
        if self.parameters and torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._queue)  # type: ignore[no-untyped-call]

    def _queue(self, _: Tensor) -> None:
        if self.enabled:
            self._reached = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        """Called once per parameter at the end of a backward pass: the first call averages."""
        if self._reached:
            self._reached = False
            for group in self.groups:
                average_gradients(self.parameters, group)


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup | None) -> None:
    """Replace gradients by their means over a group. They are row-sparse, dense, or None, which
    counts as zero. Every rank gathers the rows of all ranks, because NCCL cannot sum sparse
    tensors."""
    if not parameters or dist.get_world_size(group) == 1:
        return
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = summed_rows(parameter.grad)
    layouts = _layouts([parameter.grad for parameter in parameters], parameters[0].device, group)
    size = dist.get_world_size(group)
    for parameter, layout in zip(parameters, layouts, strict=True):
        dims = [dim for dim, _ in layout]
        if min(dims) < 0:
            parameter.grad = _dense_mean(parameter, group)
        elif max(dims) > 0:
            rows = [n for _, n in layout]
            parameter.grad = _row_sum(parameter.grad, parameter, max(dims), rows, group, size)


@torch.no_grad()
def sum_of_ranks(gradient: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of a gradient over a group: row-sparse or dense, the same on all ranks."""
    if not gradient.is_sparse:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=group)
        return gradient
    gradient = summed_rows(gradient)
    (layout,) = _layouts([gradient], gradient.device, group)
    rows = [n for _, n in layout]
    return _row_sum(gradient, gradient, gradient.sparse_dim(), rows, group)


def _layouts(
    gradients: Sequence[Tensor | None], device: torch.device, group: ProcessGroup | None
) -> list[tuple[tuple[int, int], ...]]:
    """For each gradient its :func:`_layout` on every rank."""
    own = torch.tensor([_layout(gradient) for gradient in gradients], device=device)
    by_rank = torch.stack(_gather(own, group)).tolist()
    return list(zip(*by_rank, strict=True))


def _layout(gradient: Tensor | None) -> tuple[int, int]:
    """Numbers of sparse dimensions and rows; (0, 0) for None, (-1, 0) for a dense gradient."""
    if gradient is None:
        return 0, 0
    return (gradient.sparse_dim(), gradient._nnz()) if gradient.is_sparse else (-1, 0)


def _dense_mean(parameter: nn.Parameter, group: ProcessGroup | None) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
    gradient = gradient / dist.get_world_size(group)
    dist.all_reduce(gradient, group=group)
    return gradient


def _row_sum(
    gradient: Tensor | None,
    like: Tensor,
    dims: int,
    rows: list[int],
    group: ProcessGroup | None,
    divisor: int = 1,
) -> Tensor:
    """The sum over the ranks, divided by ``divisor``, of row-sparse gradients of the shape and
    dtype of ``like``, with ``rows[r]`` rows on rank r; None: no row."""
    index = torch.zeros(dims, max(rows), dtype=torch.int64, device=like.device)
    values = torch.zeros(max(rows), *like.shape[dims:], dtype=like.dtype, device=like.device)
    if gradient is not None:
        index[:, : gradient._nnz()] = gradient._indices()
        values[: gradient._nnz()] = gradient._values()
    indices = [part[:, :n] for part, n in zip(_gather(index, group), rows, strict=True)]
    parts = [part[:n] for part, n in zip(_gather(values, group), rows, strict=True)]
    return torch.sparse_coo_tensor(
        torch.cat(indices, 1),
        torch.cat(parts) / divisor,
        like.shape,
        check_invariants=False,
    ).coalesce()


def _gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


def head_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of the heads in a module by name: class weights, which never change."""
    return {
        f"{name}.{own}".lstrip("."): buffer
        for name, part in module.named_modules()
        if isinstance(part, Head)
        for own, buffer in part.named_buffers()
    }


def check_same_tables(module: nn.Module, groups: Sequence[ProcessGroup | None]) -> None:
    """Raises ValueError on all ranks unless their heads have the same tables."""
    tables = {name: b for name, b in head_buffers(module).items() if not b.is_meta}
    devices = [table.device for table in tables.values()]
    for name, part in module.named_modules():
        if isinstance(part, Tables) and part.tables_device.type != "meta":
            tables[f"{name}.{EXTRA_STATE}"] = part.get_extra_state()
            devices.append(part.tables_device)
    if not tables:
        return
    digest = hashlib.sha256()
    for name, table in tables.items():
        digest.update(name.encode())
        digest.update(table.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)
    own = torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).to(devices[0])
    for group in groups:
        every = _gather(own, group)
        others = [rank for rank, one in enumerate(every) if not torch.equal(one, every[0])]
        if others:
            raise ValueError(
                "module: expected heads with the same trees, feature subsets and class weights on "
                f"all ranks, got others on {others} than on rank 0; build them from the same data "
                "and seed"
            )
