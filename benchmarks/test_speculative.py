"""The page of benchmarks/speculative.py, at a small size."""

from __future__ import annotations

import re

import pytest

from benchmarks.speculative import main


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--classes", "60", "--features", "8", "--root", "8"]
    main([*sizes, "--words", "6", "--rounds", "1", "-k", "2", "3"])
    out = capsys.readouterr().out
    assert "**V = 60, D = 8, C = 8**" in out
    assert len(re.findall(r"^\| [23] \| [\d.]+ \| [\d,]+ \| [\d.]+ \|$", out, re.M)) == 2
