"""A build without CUDA under a torch that has it: operators and --version say why and what to do.

The torch at hand is told that it has CUDA. Without a GPU there are no CUDA tensors, so operators
are called with CPU tensors where the dispatcher would call them with CUDA tensors.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hstree

pytestmark = pytest.mark.skipif(
    hstree.build_info().cuda is not None, reason="hstree was built with CUDA"
)

PRETEND = """
import torch
torch.version.cuda, torch.version.hip = {cuda!r}, {hip!r}
"""
OPERATORS = """
import hstree
from hstree._extension import CPU_OPERATORS

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
for name in torch._C._dispatch_get_all_op_names():
    if name.startswith("hstree::") and has_kernel(name, "CPU"):
        cpu_only = name.removeprefix("hstree::") in CPU_OPERATORS
        assert has_kernel(name, "CUDA") != cpu_only, name
keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
input, index = torch.ones(1, 3), torch.tensor([[0, 2]], dtype=torch.int32)
try:
    torch.ops.hstree.feature_gather.default.redispatch(keys, input, index)
except RuntimeError as error:
    print(type(error).__name__, error)
print(torch.ops.hstree.feature_gather(input, index).tolist())
"""
WITHOUT = """
import hstree
names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
print([name for name in names if name.startswith("hstree::")])
"""
VERSION = """
from hstree.__main__ import main
assert main(["--version"]) == 0
"""


def run(code: str, folder: Path, *, cuda: str | None = None, hip: str | None = None) -> list[str]:
    """The lines that the code prints."""
    shown = subprocess.run(
        [sys.executable, "-c", PRETEND.format(cuda=cuda, hip=hip) + code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()


CAPABILITY = torch.ops.hstree.cpu_capability()
REASON = f"CPU only: {hstree.build_info().cpu_only}"
FIX = "; fix: with the CUDA 14.1 toolkit on PATH, in a clone: HSTREE_CUDA=1 pip install "


def test_torch_with_cuda(tmp_path: Path) -> None:
    error, result, version = run(OPERATORS + VERSION, tmp_path, cuda="14.1")
    expected = f"RuntimeError hstree: expected CPU tensors, got CUDA; this build is {REASON}{FIX}"
    assert error.startswith(expected)
    assert result == "[[[1.0, 1.0]]]"
    assert version.startswith(f"hstree {hstree.__version__} (torch ")
    assert f"), CPU kernels for {CAPABILITY}, {REASON}{FIX}" in version


def test_rocm(tmp_path: Path) -> None:
    error, _ = run(OPERATORS, tmp_path, hip="6.4")
    assert error.endswith(f"{REASON}; hstree has no kernels for ROCm")


def test_torch_without_cuda(tmp_path: Path) -> None:
    """Nothing is registered for CUDA, and nothing is to be fixed."""
    names, version = run(WITHOUT + VERSION, tmp_path)
    assert names == "[]"
    assert version.endswith(f"), CPU kernels for {CAPABILITY}, {REASON}")
