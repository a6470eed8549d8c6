"""Settings of all benchmarks: one thread, freed memory, short runs, devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.paths import draw_paths
from benchmarks.word2vec import corpus


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def release_memory() -> Iterator[None]:
    """Frees what the contestants of one test share before the next test."""
    yield
    draw_paths.cache_clear()
    corpus.cache_clear()


@pytest.fixture
def short(request: pytest.FixtureRequest) -> bool:
    """Whether the run only checks that the benchmarks work: --benchmark-max-time below a second."""
    return float(request.config.getoption("benchmark_max_time")) < 1
