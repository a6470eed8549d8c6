"""All classes, the most probable ones and samples of a softmax and of trees.

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


@pytest.mark.parametrize("rows", sorted({*DECODED_ROWS["cpu"], *DECODED_ROWS["cuda"]}))
def test_decoding(benchmark: Any, short: bool, device: str, rows: int) -> None:
    if rows not in DECODED_ROWS[device]:
        pytest.skip(f"N = {rows} is for the other device")
    name = f"decoding, N = {rows}"
    size, rounds = (TINY, 1) if short else (WIKITEXT, 5)
    benchmark.group = f"{name} ({device})"
    contest(benchmark, CONTESTS[name], size, device, rounds)
