"""Memory: what a device has left, and how to say it."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device without swapping; None where nobody knows.

    On a GPU what the driver has free. On the CPU Linux's own estimate (MemAvailable), elsewhere the
    size of the physical memory.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def gibibytes(size: int) -> str:
    """1.25 GiB, or 12.5 MiB below a tenth of that."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
