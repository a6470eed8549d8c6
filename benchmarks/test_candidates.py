"""The page of benchmarks/candidates.py, at a small size."""

from __future__ import annotations

import re

import pytest

from benchmarks.candidates import COUNTS, HEADS, KINDS, ROWS, main


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "8", "600"])
    out = capsys.readouterr().out
    lines = re.findall(r"^\| \d+ \| \d+ \| [a-z ]+ \| [\d.]+ ms \| [\d.]+ \| [\d.]+ \|", out, re.M)
    assert len(lines) == 2 * len(HEADS) * len(ROWS) * len(COUNTS) * len(KINDS)
