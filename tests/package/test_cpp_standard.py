"""The C++ sources under the oldest standard that a supported torch compiles them with."""

from __future__ import annotations

import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def test_sources_are_cpp17() -> None:
    """torch 2.11 passes -std=c++17, later ones c++20."""
    sources = sorted(str(path) for room in ("cpu", "ops") for path in (CSRC / room).glob("*.cpp"))
    assert len(sources) > 20
    system = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    command = ["c++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}"]
    command += [*system, "-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020b000000000000"]

    def errors(half: list[str]) -> str:
        return subprocess.run([*command, *half], capture_output=True, text=True, check=False).stderr

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(errors, (sources[::2], sources[1::2]))) == ["", ""]
