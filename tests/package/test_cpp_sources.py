"""Every C++ source compiles without warnings with the flags of setup.py, with CUDA and without."""

from __future__ import annotations

import runpy
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pybind11
import pytest
from torch.utils.cpp_extension import include_paths

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup() -> dict[str, Any]:
    """What setup.py defines; it builds nothing unless it is run."""
    return runpy.run_path(str(ROOT / "setup.py"))


def sources(*rooms: str) -> list[str]:
    return sorted(str(path) for room in rooms for path in (ROOT / "csrc" / room).glob("*.cpp"))


def errors(files: list[str], flags: list[str], headers: list[str]) -> str:
    """What the compiler prints, two processes at a time; torch's headers are exempt from it."""
    command = ["c++", "-fsyntax-only", "-Werror", *flags, f"-I{ROOT / 'csrc'}"]
    command += [f"-isystem{path}" for path in (*headers, sysconfig.get_path("include"))]

    def compile_half(half: list[str]) -> str:
        return subprocess.run([*command, *half], capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor(2) as pool:
        return "".join(pool.map(compile_half, (files[::2], files[1::2])))


@pytest.mark.parametrize("cuda", [False, True])
def test_operators(setup: dict[str, Any], cuda: bool) -> None:
    """In the standard of torch 2.11; later ones pass c++20, as a build with them shows."""
    files = sources("ops") if cuda else sources("ops", "cpu")  # csrc/cpu knows nothing of CUDA
    assert len(files) > 10
    flags = [*setup["OPERATOR_FLAGS"], *(setup["CUDA_DEFINES"] if cuda else []), "-std=c++17"]
    printed = errors(files, flags, include_paths())
    assert not printed, printed


def test_host_module(setup: dict[str, Any]) -> None:
    files = sources("host")
    assert len(files) > 3
    printed = errors(files, setup["HOST_FLAGS"], [pybind11.get_include()])
    assert not printed, printed
