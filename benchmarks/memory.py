"""Peak extra memory of a step, in a process of its own.

    python -m benchmarks.memory CONTEST DEVICE SIZE NAME

prints bytes as JSON. CONTEST is a name in benchmarks.registry, SIZE its four numbers separated by
commas.

The result is the increase of the process's peak resident memory by a first step: logits, workspaces
and the resulting gradients. Parameters, inputs and code are not counted, since a tiny step runs
before. malloc maps every block of 64 KiB or more separately, so that memory that it only keeps for
later is not counted; otherwise a step with many smaller tensors would take up to twice as much. On
a GPU, the result is the memory allocated by torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import astuple
from pathlib import Path

import torch

from benchmarks.contest import TINY, Size

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


def measure(contest: str, names: Iterable[str], size: Size, device: str) -> dict[str, int | None]:
    """Peak extra bytes of the steps of a contest by name, each in a process of its own."""
    peaks: dict[str, int | None] = {}
    for name in names:
        command = [sys.executable, "-m", "benchmarks.memory", contest, device]
        done = subprocess.run(
            [*command, ",".join(map(str, astuple(size))), name],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        peaks[name] = json.loads(done.stdout)
    return peaks


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


def main() -> None:
    from benchmarks.registry import CONTESTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("contest", choices=sorted(CONTESTS))
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("size", type=lambda text: Size(*map(int, text.split(","))))
    parser.add_argument("name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    build, device = CONTESTS[arguments.contest][arguments.name], arguments.device
    map_large_blocks()
    build(TINY, device).step()
    print(json.dumps(peak_extra_bytes(build(arguments.size, device).step, device)))


if __name__ == "__main__":
    main()
