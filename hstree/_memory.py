"""Memory: errors that say that it ran out, how much is available."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of Python, torch, a GPU, or an operator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = r"(not enough|can't allocate|could not allocate|out of) memory|bad_alloc|size .*overflow"
    return isinstance(error, RuntimeError) and re.search(said, str(error)) is not None


def available_memory(device: torch.device) -> int | None:
    """Bytes that are available on a device without swapping: free memory of the driver on a GPU,
    the kernel's estimate on Linux, otherwise all physical memory; None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def gibibytes(size: int) -> str:
    """A size such as 1.25 GiB, or in MiB below a tenth of a GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
