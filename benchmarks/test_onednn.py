"""The page of benchmarks/onednn.py, at a small size."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from benchmarks.onednn import HEADS, main


def test_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a file of its own for another instruction set than AVX-512, with what chose it."""
    enabled, capability = torch._C._get_mkldnn_enabled(), torch.ops.hstree.cpu_capability()
    monkeypatch.setenv("HSTREE_CPU_CAPABILITY", capability)
    main(["--classes", "600", "--output", str(tmp_path)])
    name = "onednn.md" if capability == "avx512" else f"onednn-{capability}.md"
    page = (tmp_path / name).read_text()
    assert f"HSTREE_CPU_CAPABILITY={capability} python -m benchmarks.onednn" in page
    assert f", CPU kernels for {capability}, one thread, torch " in page
    assert torch._C._get_mkldnn_enabled() == enabled
    row = r"^\| ([a-z, ]+) \| +600 \| +[\d.]+ ms \| +[\d.]+ ms \| +[\d.]+ \|$"
    assert re.findall(row, capsys.readouterr().out, re.M) == list(HEADS)
