"""All classes, the most probable ones and samples of a softmax and of trees, on one core.

pytest benchmarks/test_decoding.py --benchmark-only --benchmark-json=run.json
python -m benchmarks.table run.json
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contest import TINY, contest
from benchmarks.decoding import DECODED_ROWS
from benchmarks.paths import WIKITEXT
from benchmarks.registry import CONTESTS


@pytest.mark.parametrize("rows", DECODED_ROWS)
def test_decoding(benchmark: Any, short: bool, rows: int) -> None:
    name = f"decoding, N = {rows}"
    size, rounds = (TINY, 1) if short else (WIKITEXT, 5)
    benchmark.group = f"{name} (cpu)"
    contest(benchmark, CONTESTS[name], size, "cpu", rounds)
