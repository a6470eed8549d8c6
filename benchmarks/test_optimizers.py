"""Steps of optimisers with row-sparse gradients, one core.

pytest benchmarks/test_optimizers.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contest import TINY, Size, contest
from benchmarks.optimizers import OPTIMIZER_SIZES
from benchmarks.registry import CONTESTS


@pytest.mark.parametrize("size", OPTIMIZER_SIZES, ids=str)
def test_optimizers(benchmark: Any, short: bool, size: Size) -> None:
    name = f"optimizers, V = {size.classes}"
    size, rounds = (TINY, 1) if short else (size, 7)
    benchmark.group = f"{name} (cpu)"
    contest(benchmark, CONTESTS[name], size, "cpu", rounds)
