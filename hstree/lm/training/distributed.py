"""Several processes that train one model, and what they exchange."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hstree.distributed import DistributedDataParallel
from hstree.lm.runs import choose_device

PATIENCE = timedelta(days=1)  # while the first process tokenizes a large text or validates

_Value = TypeVar("_Value")


def is_main_process() -> bool:
    """Whether this process prints and writes: it is the only one, or the first of torchrun."""
    return int(os.environ.get("RANK", "0")) == 0


@dataclass(frozen=True)
class Processes:
    """The processes of a training run: the number of this one, from 0, how many there are, and the
    device of this one. Every method must be called by all of them."""

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this process validates, prints and writes."""
        return self.rank == 0

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """A context that the first process enters and leaves before the others enter it."""
        if self.size > 1 and not self.main:
            dist.barrier()
        yield
        if self.size > 1 and self.main:
            dist.barrier()

    def sum(self, *values: float) -> list[float]:
        """Sums over the processes, in float64."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def from_main(self, value: _Value) -> _Value:
        """The value of the first process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all processes, by rank; all have the same shape."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.to(self.device).contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor)
        return tensors

    def wrap(self, module: nn.Module, *, may_skip_parameters: bool) -> nn.Module:
        """The module in DistributedDataParallel, with the weights of the first process. One
        process: the module itself. ``may_skip_parameters``: whether a step may leave some
        parameters without a gradient."""
        if self.size == 1:
            return module
        return DistributedDataParallel(
            module,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            find_unused_parameters=may_skip_parameters,
            gradient_as_bucket_view=True,
        )


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes that ``torchrun`` has started, or this one alone. Joins a process group (nccl
    on GPUs, gloo on CPUs) temporarily, unless there is one already.

    ``device`` is a ``--device`` setting; with torchrun the GPU is that of the local rank. Raises
    ConfigError if it does not exist.
    """
    chosen = choose_device(device)
    if not dist.is_available() or (not dist.is_initialized() and "WORLD_SIZE" not in os.environ):
        yield Processes(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    joined = not dist.is_initialized()
    if joined:
        if chosen.type == "cuda":
            dist.init_process_group("nccl", device_id=chosen, timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        if joined:
            # A gloo thread that releases a Python tensor waits for the interpreter lock, and
            # destroying the group waits for that thread while it holds the lock. Give the threads
            # time to finish first.
            time.sleep(0.1)
            dist.destroy_process_group()
