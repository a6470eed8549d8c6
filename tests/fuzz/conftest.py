"""The same cases in every run, or with HSTREE_FUZZ above 1 new ones that an error line repeats."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from fuzz.scale import FACTOR

if FACTOR > 1:
    hypothesis.settings.register_profile(
        "hstree-fuzz",
        derandomize=False,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("hstree-fuzz")


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The tensors are small; threads that wait for each other would cost more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
