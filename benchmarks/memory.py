"""Peak extra memory of a step, in a process of its own.

The result is the increase of the process's peak resident memory by a first step: logits, workspaces
and the resulting gradients. Parameters, inputs and code are not counted, since a tiny step runs
before. malloc maps every block of 64 KiB or more separately, so that memory that it only keeps for
later is not counted; otherwise a step with many smaller tensors would take up to twice as much. On
a GPU, the result is the memory allocated by torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[1]


def peak_extra_bytes(step: Callable[[], object], device: str = "cpu") -> int | None:
    """Increase of the peak memory by a step; None where it is unavailable (not on Linux)."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # so that the step cannot reuse freed memory
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
        before = _resident("VmRSS")
        step()
        return _resident("VmHWM") - before
    except (AttributeError, OSError):
        return None


def of_process(make: Callable[..., tuple[Callable[[], object], str]], *of: Any) -> int | None:
    """Peak extra bytes of the step on a device that a function of a module makes, in a process of
    its own, with one thread."""
    path = mock.patch.object(sys, "path", [*sys.path, str(ROOT)])  # the new process takes it over
    with path, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_of_step, make, *of).result()


def _of_step(make: Callable[..., tuple[Callable[[], object], str]], *of: Any) -> int | None:
    torch.set_num_threads(1)
    map_large_blocks()
    return peak_extra_bytes(*make(*of))


def map_large_blocks() -> None:
    """Have malloc map every block of 64 KiB or more by itself."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).mallopt(mmap_threshold, 2**16)


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
