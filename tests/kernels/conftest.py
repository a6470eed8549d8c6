"""The CUDA operators under the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_emu.library import ORDERS, EmulatedLibrary

from kernels.emulation import Kernels


@pytest.fixture
def kernels(emulated: EmulatedLibrary) -> Iterator[Kernels]:
    """The emulated operators, in ascending order of threads and blocks before and after."""
    kernels = Kernels(emulated)
    kernels.set_order(*ORDERS[0])
    yield kernels
    kernels.set_order(*ORDERS[0])
