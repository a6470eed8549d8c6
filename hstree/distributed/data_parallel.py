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
    the backward pass and in the same order on all ranks. Torch's class handles all other
    parameters. ``no_sync``, ``find_unused_parameters`` and ``init_sync`` apply to both. The tables
    of heads never change: they are compared once, and not broadcast in each step. Torch's class is
    sufficient for a model without row-sparse gradients.

    Args:
        module: the model. Its heads have the same trees and feature subsets on all ranks.
        **options: arguments of torch's class.

    Raises:
        ValueError: if the ranks have different trees, or all parameters are row-sparse.

    Example:
        In a script that ``torchrun`` starts, leave out the arguments after ``"gloo"``:

        >>> import torch, hstree
        >>> from torch import distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> head = hstree.TreeEnsemble.from_counts(16, range(2000, 0, -1), sparse=True)
        >>> model = hstree.distributed.DistributedDataParallel(head)
        >>> optimizer = hstree.optim.AdamW(model.parameters())
        >>> model(torch.randn(4, 16), torch.arange(4)).loss.backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        sparse = row_sparse_parameters(module)
        left_out = {id(parameter) for parameter in sparse}
        if left_out and all(id(p) in left_out for p in module.parameters() if p.requires_grad):
            raise ValueError(
                "module: expected at least one parameter with dense gradients, got only row-sparse "
                "ones; wrap the whole model, or use hstree.distributed.fully_shard"
            )
        names = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in left_out
        ]
        names += head_buffers(module)
        names += getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        # Torch prepends a dot to the names of the module's own parameters in one place.
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
        """Same as torch's method. Not implemented for row-sparse gradients, which a rank that has
        joined does not have."""
        if self._averaging.parameters:
            raise NotImplementedError(
                "join: expected a model without row-sparse gradients; give every rank the same "
                "number of batches, or build the head with sparse=False"
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

    Row-sparse parameters are not sharded and keep their dtype. They start with the values of the
    first rank, and their gradients are averaged as rows at the end of the backward pass. All other
    parameters are sharded. Those of trees, [T, rows, S], are sharded in the first dimension that is
    divisible by the number of ranks, because there may be fewer trees than ranks.

    As with torch's function, apply it to the layers first and to the model last. If it was applied
    to a head itself, the head also works outside of ``forward``: ``log_prob``, ``topk``,
    ``predict``, ``sample`` and ``entropy`` gather its parameters. The same holds for torch's
    function, which is sufficient for a head with dense gradients.

    Args:
        module: module to shard in place. Its heads have the same trees and feature subsets on all
            ranks.
        mesh: ranks that share the batch; None: all.
        ignored_params: further parameters that are not sharded.
        **options: arguments of torch's function.

    Returns:
        The module.

    Raises:
        ValueError: if the ranks have different trees, or row-sparse parameters have no data yet.

    Example:
        In a script that ``torchrun`` starts, leave out the arguments after ``"gloo"``:

        >>> import torch, hstree
        >>> from torch import distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.init_device_mesh("cpu", (1,))
        >>> head = hstree.TreeEnsemble.from_counts(16, range(2000, 0, -1), sparse=True)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), head)
        >>> for part in (head, model):
        ...     _ = hstree.distributed.fully_shard(part, mesh=mesh)
        >>> head.predict(torch.randn(4, 16)).shape
        torch.Size([4])
        >>> dist.destroy_process_group()
    """
    from torch.distributed import fsdp  # takes a second to import

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
    """Function for the dimension in which to shard a parameter; None: the default."""
    from torch.distributed.tensor import Shard

    size = dist.get_world_size() if mesh is None else mesh.size(mesh.ndim - 1)
    of_trees = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, TreeEnsemble)
        for parameter in part.nodes.parameters()
    }

    def placement(parameter: nn.Parameter) -> Shard | None:
        divided = [dim for dim, n in enumerate(parameter.shape) if n % size == 0]
        return Shard(divided[0]) if id(parameter) in of_trees and divided else None

    return placement
