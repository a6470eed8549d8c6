"""What plif and target_log_softmax are held to in processes of their own: memory, instruction
sets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ops.apart import TESTS, every_instruction_set, with_instruction_set
from ops.cases import measures_memory
from ops.logit_function_cases import results

MEMORY = r"""
import re, pathlib, torch, hstree
torch.set_num_threads(2)
status = pathlib.Path("/proc/self/status")
peak = lambda: int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1]) / 1024  # MiB
ops = torch.ops.hstree
target = torch.zeros(100).long()

def head_step(logits, table):
    grad, rest = torch.ones(100), (0.0, 2.0, table, 20.0)
    log_normalizer = ops.target_log_softmax(logits, target, *rest)[1]
    ops.target_log_softmax_backward_(logits, grad, target, log_normalizer, *rest)

tables = [torch.full((100_000, width), 4e-4) for width in (2, 4)]
small = torch.zeros(100, 100)
for table in tables:  # threads and code are there
    ops.piecewise_backward(small, small, table, 20.0)
    head_step(small, table)

x = torch.full((12 << 20,), 0.3)
for table in (None, *tables):  # there is no room under the peak yet
    before = peak()
    head_step(x[: 100 * 100_000].view(100, 100_000), table)
    print(peak() - before)
grad = torch.ones(12 << 20)
before = peak()
ops.piecewise(x, tables[0], 20.0)
print(peak() - before)
for table in tables:  # now there is room for one tensor
    before = peak()
    ops.piecewise_backward(grad, x, table, 20.0)
    print(peak() - before)
"""


@measures_memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory() -> None:
    """target_log_softmax: 38 MiB of logits and nothing of their size. plif: 48 MiB of input, as
    much for the output or, in its place, grad_input. Beside them the sums of 100,000 intervals:
    0.8 MB for each power of u, and for some threads."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=TESTS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *head_steps, output, linear, cubic = map(float, done.stdout.split())
    assert 40 < output < 56
    assert len(head_steps) == 3
    assert max(*head_steps, linear, cubic) < 16


@pytest.mark.slow
@every_instruction_set
def test_every_instruction_set(capability: str, tmp_path: Path) -> None:
    """All cases again, and the same results but for roundings."""
    call = "check_every_case()"
    of_other = with_instruction_set(capability, "ops.logit_function_cases", call, tmp_path)
    for got, expected in zip(of_other, results(), strict=True):
        scale = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * scale)
