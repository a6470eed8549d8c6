"""Data-parallel training of models with row-sparse parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from hstree.distributed.averaging import (
    RowAveraging,
    check_same_tables,
    head_buffers,
    row_sparse_parameters,
)
from hstree.heads import TreeEnsemble

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

_Module = TypeVar("_Module", bound=nn.Module)


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """:class:`torch.nn.parallel.DistributedDataParallel` for models with row-sparse gradients.

    The gradients of heads and embeddings with ``sparse=True`` are averaged as rows, at the end of
    the backward pass and in one order on all ranks; everything else is torch's. ``no_sync``,
    ``find_unused_parameters`` and ``init_sync`` hold for both. The tables of heads, which never
    change, are compared once and not broadcast in each step.

    Args:
        module: its heads have the same trees and feature subsets on all ranks.
        options: of torch's class.

    Raises:
        ValueError: the ranks have different trees, or all parameters are row-sparse.

    A model without row-sparse gradients may as well be wrapped by torch's class.

    Example:
        >>> head = hstree.heads.TreeEnsemble(64, 1000, trees, sparse=True)
        >>> model = hstree.distributed.DistributedDataParallel(Model(head))
        >>> optimizer = hstree.optim.AdamW(model.parameters())
        >>> model(hidden, target).loss.backward()  # as in one process with all batches
        >>> optimizer.step()
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        sparse = row_sparse_parameters(module)
        left_out = {id(parameter) for parameter in sparse}
        if left_out and all(id(p) in left_out for p in module.parameters() if p.requires_grad):
            raise ValueError(
                "module: expected a parameter with dense gradients beside the row-sparse ones, "
                "got none; wrap the whole model, or use hstree.distributed.fully_shard"
            )
        names = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in left_out
        ]
        names += head_buffers(module)
        names += getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        # In one place torch puts a dot before the names of the module's own parameters.
        names += [f".{name}" for name in names if "." not in name]
        self._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]
        mesh = options.get("device_mesh")
        group = options.get("process_group") if mesh is None else mesh.get_group()
        check_same_tables(module, [group])
        averaging = RowAveraging(sparse, [group])
        super().__init__(module, **options)
        self._averaging = averaging
        if options.get("init_sync", True):
            self._averaging.broadcast()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        self._averaging.enabled = self.require_backward_grad_sync
        if self.find_unused_parameters and self.require_backward_grad_sync:
            self._averaging.watch(output)
        return output

    def join(self, *arguments: Any, **options: Any) -> Any:
        """As torch's; refused for row-sparse gradients, which a rank that has joined lacks."""
        if self._averaging.parameters:
            raise NotImplementedError(
                "join: expected a model without row-sparse gradients; give every rank as many "
                "batches, or build the head with sparse=False"
            )
        return super().join(*arguments, **options)


def fully_shard(
    module: _Module,
    *,
    mesh: DeviceMesh | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    **options: Any,
) -> _Module:
    """:func:`torch.distributed.fsdp.fully_shard` for models with row-sparse gradients.

    Row-sparse parameters stay whole on every rank and in their dtype, begin as those of the first
    rank, and their gradients are averaged as rows at the end of the backward pass. All other
    parameters are sharded; those of trees, [T, rows, S], in the first dimension that the ranks
    divide, as there may be fewer trees than ranks.

    As with torch's function, apply it to the layers first and to the model last. A head to which
    it, or torch's, was applied itself works outside of ``forward`` too: ``log_prob``, ``topk``,
    ``predict``, ``sample`` and ``entropy`` gather its parameters.

    Args:
        module: changed in place. Its heads have the same trees and feature subsets on all ranks.
        mesh: ranks that share the batch; None: all.
        ignored_params: further parameters to leave alone.
        options: of torch's function.

    Returns:
        The module.

    Raises:
        ValueError: the ranks have different trees, or row-sparse parameters have no data yet.

    A head with dense gradients may as well be sharded by torch's function.

    Example:
        >>> hstree.distributed.fully_shard(model.head)
        >>> hstree.distributed.fully_shard(model)
    """
    from torch.distributed import fsdp  # a second of imports

    sparse = row_sparse_parameters(module)
    done = {
        id(parameter)
        for part in module.modules()
        if part is not module and isinstance(part, fsdp.FSDPModule)
        for parameter in part.parameters()
    }
    groups: Sequence[ProcessGroup | None] = [None] if mesh is None else mesh.get_all_groups()
    averaging = RowAveraging([p for p in sparse if id(p) not in done], groups)
    options.setdefault("shard_placement_fn", _placement(module, mesh))
    fsdp.fully_shard(module, mesh=mesh, ignored_params={*sparse, *ignored_params}, **options)
    check_same_tables(module, groups)
    averaging.broadcast()
    module._row_averaging = averaging  # type: ignore[assignment]  # lives as long as the module
    return module


def _placement(
    module: nn.Module, mesh: DeviceMesh | None
) -> Callable[[nn.Parameter], Shard | None]:
    """In which dimension to shard a parameter; None: the default."""
    from torch.distributed.tensor import Shard

    size = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    of_trees = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, TreeEnsemble)
        for parameter in part.parameters(recurse=False)
    }

    def placement(parameter: nn.Parameter) -> Shard | None:
        divided = [dim for dim, n in enumerate(parameter.shape) if n % size == 0]
        return Shard(divided[0]) if id(parameter) in of_trees and divided else None

    return placement
