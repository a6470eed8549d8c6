"""The page of benchmarks/onednn.py, at a small size."""

from __future__ import annotations

import re

import pytest
import torch

from benchmarks.onednn import HEADS, main


def test_page(capsys: pytest.CaptureFixture[str]) -> None:
    enabled = torch._C._get_mkldnn_enabled()
    main(["--classes", "600"])
    assert torch._C._get_mkldnn_enabled() == enabled
    row = r"^\| ([a-z, ]+) \| +600 \| +[\d.]+ ms \| +[\d.]+ ms \| +[\d.]+ \|$"
    assert re.findall(row, capsys.readouterr().out, re.M) == list(HEADS)
