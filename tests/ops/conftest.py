from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_emu.library import EmulatedLibrary


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small; threads that wait for each other would cost more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EMULATED = pytest.param("emulated", marks=pytest.mark.slow)  # all of them together


@pytest.fixture(params=["cpu", EMULATED, pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device that the operators run on; "emulated": the CUDA operators for CPU tensors."""
    if request.param != "emulated":
        yield torch.device(request.param)
        return
    library: EmulatedLibrary = request.getfixturevalue("emulated")
    with library.on_cpu_tensors():
        yield torch.device("cpu")
