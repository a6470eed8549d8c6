"""Processes of one gloo group, each of which runs the same functions."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

HANGS = timedelta(minutes=30)
"""A process that waits so long for another waits for ever; no load of the machine reaches it."""


def launch(modules: Sequence[str], size: int = 2) -> list[dict[str, Any]]:
    """What each process returns for each of the SCENARIOS of these modules. An exception of
    one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(
            _process, (list(modules), size, folder), nprocs=size, join=False
        )
        try:
            while not context.join():  # whether all have ended
                pass
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]


def _process(rank: int, modules: list[str], size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=HANGS)
    found: dict[str, Any] = {}
    scenarios = [
        item for name in modules for item in importlib.import_module(name).SCENARIOS.items()
    ]
    for name, scenario in scenarios:
        print(f"rank {rank}: {name}", file=sys.stderr)
        torch.manual_seed(0)
        found[name] = scenario()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # the threads of gloo may outlive the interpreter, and end it with an abort
