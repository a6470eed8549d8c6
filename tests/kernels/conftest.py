"""The CUDA sources, compiled for the CPU once for each test session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from kernels.emulation import ORDERS, Kernels, compile_kernels


@pytest.fixture(scope="session")
def compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        pytest.skip("g++ not found: the CUDA kernels cannot be emulated")
    return path


@pytest.fixture(scope="session")
def emulated(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(compile_kernels(tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def kernels(emulated: Kernels) -> Iterator[Kernels]:
    """The emulated launchers, in ascending order of threads and blocks before and after."""
    emulated.set_order(*ORDERS[0])
    yield emulated
    emulated.set_order(*ORDERS[0])
