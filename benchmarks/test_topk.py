"""The page of benchmarks/topk.py, at a small size."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.contest import Size
from benchmarks.decoding import decoding_head
from benchmarks.topk import COUNTS, MADE_UP, ROWS, main, shares
from hstree.heads import TreeEnsemble


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "8", "600"])
    out = capsys.readouterr().out
    lines = re.findall(r"^\| \d+ \| \d+ \| [\d.]+ \| [\d.]+ \| (all|search) \|", out, re.M)
    assert len(lines) == len(MADE_UP) * len(ROWS) * len(COUNTS)


def test_shares() -> None:
    """Of all classes: everything."""
    size = Size(rows=4, features=8, classes=300, latent=8)
    head, hidden = decoding_head("C = 256, T = 4 (default)", size)
    assert isinstance(head, TreeEnsemble)
    with torch.inference_mode():
        assert shares(head, hidden, 300) == (1.0, 1.0)
        must, oracle = shares(head, hidden, 1)
    assert 0.0 < oracle <= must < 1.0
