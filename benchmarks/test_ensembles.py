"""Whole tree ensembles against torch's own losses and against their kernels, on one core.

pytest benchmarks/test_ensembles.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contest import TINY, contest
from benchmarks.ensembles import MODULE, SHARED_SIZES
from benchmarks.memory import measure
from benchmarks.paths import WIKITEXT
from benchmarks.registry import CONTESTS


@pytest.mark.parametrize(
    ("name", "rounds"), [("wide", 3), ("wide parts", 9), ("binary parts", 9)], ids=str
)
def test_ensemble(benchmark: Any, short: bool, name: str, rounds: int) -> None:
    size, rounds = (TINY, 1) if short else (WIKITEXT, rounds)
    benchmark.group = f"{name} (cpu)"
    result = contest(benchmark, CONTESTS[name], size, "cpu", rounds)
    if name == "wide" and not short:
        result[MODULE]["peak_bytes"] = measure(name, [MODULE], size, "cpu")[MODULE]


@pytest.mark.parametrize("classes", SHARED_SIZES)
def test_shared_leaves(benchmark: Any, short: bool, classes: int) -> None:
    name = f"shared leaves, V = {classes}"
    size, rounds = (TINY, 1) if short else (SHARED_SIZES[classes], 9)
    benchmark.group = f"{name} (cpu)"
    contest(benchmark, CONTESTS[name], size, "cpu", rounds)
