"""The CUDA operators under the emulator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_emu.library import ORDERS, EmulatedLibrary
from ops.cases import filled_memory


@pytest.fixture
def library(emulated: EmulatedLibrary) -> Iterator[EmulatedLibrary]:
    """The CUDA operators for CPU tensors, in ascending order of threads and blocks at first."""
    with emulated.on_cpu_tensors(), filled_memory():
        yield emulated
    emulated.set_order(*ORDERS[0])
    emulated.set_shared_limit()
