"""Steps of optimizers with row-sparse gradients, and whole training steps, on one core.

pytest benchmarks/test_optimizers.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contest import TINY, Size, contest
from benchmarks.memory import measure
from benchmarks.optimizers import OPTIMIZER_SIZES, TRAINING_SIZES
from benchmarks.registry import CONTESTS


@pytest.mark.parametrize("size", OPTIMIZER_SIZES, ids=str)
def test_optimizers(benchmark: Any, short: bool, size: Size) -> None:
    name = f"optimizers, V = {size.classes}"
    size, rounds = (TINY, 1) if short else (size, 7)
    benchmark.group = f"{name} (cpu)"
    contest(benchmark, CONTESTS[name], size, "cpu", rounds)


@pytest.mark.parametrize("size", TRAINING_SIZES, ids=str)
def test_training_steps(benchmark: Any, short: bool, size: Size) -> None:
    name = f"training steps, V = {size.classes}"
    weigh = size == TRAINING_SIZES[-1] and not short
    size, rounds = (TINY, 1) if short else (size, 5)
    benchmark.group = f"{name} (cpu)"
    result = contest(benchmark, CONTESTS[name], size, "cpu", rounds)
    if weigh:
        for of, peak in measure(name, CONTESTS[name], size, "cpu").items():
            result[of]["peak_bytes"] = peak
