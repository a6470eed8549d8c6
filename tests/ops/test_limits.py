"""Operators on a CPU whose memory ends, and of very many elements."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hstree._memory import available_memory, gibibytes
from ops.cases import measures_memory
from ops.limited import ELEMENTS

TESTS = Path(__file__).resolve().parents[1]
NEEDED = 14 * 2**30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def run(*arguments: str, **variables: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", "ops.limited", *arguments],
        capture_output=True, text=True, check=False, cwd=TESTS, env=os.environ | variables,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@measures_memory
@pytest.mark.parametrize(
    "threads",
    ["1", pytest.param("2", marks=pytest.mark.slow)],
    ids=lambda count: f"threads={count}",
)
def test_exhausted_memory_is_an_error(threads: str) -> None:
    """Every operator, with memory for its first, second, ... allocation: RuntimeError, and the next
    calls return what they did."""
    # malloc gives back what is freed, so that the next limit is as strict.
    output = run("memory", OMP_NUM_THREADS=threads, MALLOC_MMAP_THRESHOLD_="65536")
    failures = dict(re.findall(r"^(\w+)\.default: (\d+) failures$", output, re.MULTILINE))
    kernels = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    operators = {name.removeprefix("hstree::") for name in kernels if name.startswith("hstree::")}
    # called by operators
    inner = {
        "target_log_softmax_backward_",
        "target_log_softmax_gradient_",
        "forest_gradient_",
        "recycled",
        "scale_",
    }
    assert operators - inner <= failures.keys()
    assert sum(int(count) > 0 for count in failures.values()) > 8


@pytest.mark.slow
@measures_memory
def test_more_elements_than_32_bits_count() -> None:
    """Forward and backward, one operator after the other, each in a process that ends."""
    available = available_memory(torch.device("cpu")) or 0
    if available < NEEDED:
        pytest.skip(f"{gibibytes(available)} of memory available, {gibibytes(NEEDED)} needed")
    for name in ELEMENTS:
        run("elements", name)
