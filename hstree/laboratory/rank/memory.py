"""Memory: what a device has left, and how to say it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that a device has without swapping: on a GPU what the driver has free, on the CPU
    Linux's own estimate, elsewhere all physical memory; None where nobody knows."""
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
    """1.25 GiB, or 12.5 MiB below a tenth of that."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
