"""Functions of the tests in processes of their own: with the vector code of one instruction set,
and on tables that could end one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

TESTS = Path(__file__).resolve().parents[1]
ARM = platform.machine() in ("aarch64", "arm64")
CAPABILITIES = ("portable", "dotprod") if ARM else ("portable", "avx2", "avx512")
every_instruction_set = pytest.mark.parametrize("capability", CAPABILITIES)


def apart(module: str, call: str, folder: Path, **environment: str) -> Any:
    """What `module.call` returns in a process of its own, with one thread."""
    code = f"import sys, torch, {module}; torch.set_num_threads(1)\n"
    code += f"torch.save({module}.{call}, sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, folder / "results"], env=os.environ | environment,
        cwd=TESTS, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.load(folder / "results")


def best_capability() -> int:
    """The place in CAPABILITIES of the best that this processor has."""
    if ARM:
        return 1
    return {"AVX2": 1, "AVX512": 2}.get(torch.backends.cpu.get_cpu_capability(), 0)


def with_instruction_set(capability: str, module: str, call: str, folder: Path) -> Any:
    if CAPABILITIES.index(capability) > best_capability():
        pytest.skip(f"this processor lacks {capability}")
    return apart(module, call, folder, HSTREE_CPU_CAPABILITY=capability)


def corrupt(table: Tensor, random: np.random.Generator) -> Tensor:
    """A copy with random numbers at up to three places."""
    table = table.clone()
    flat = table.view(-1).numpy()
    if len(flat):
        info, count = np.iinfo(flat.dtype), int(random.integers(1, 4))
        wild = random.integers(info.min, info.max, count, dtype=flat.dtype)
        near = random.integers(-60, 60, count).astype(flat.dtype)
        places = random.integers(0, len(flat), count)
        flat[places] = np.where(random.random(count) < 0.3, wild, near)
    return table


def outcomes(attempts: Iterable[Callable[[], object]]) -> tuple[int, int]:
    """How many raise an error of an operator, and how many give a result."""
    refused = accepted = 0
    for attempt in attempts:
        try:
            attempt()
            accepted += 1
        except RuntimeError as error:
            if not str(error).startswith("hstree::"):
                raise
            refused += 1
    return refused, accepted
