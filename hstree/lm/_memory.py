"""Available memory of a device, and its formatting."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


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
