"""The page of benchmarks/generation.py, of a small model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import generation
from hstree.lm.report import markdown


def test_a_small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def small(data: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        config.bos_token_id = config.eos_token_id = None
        model, tokens = GPT2LMHeadModel(config).eval(), torch.randint(50, (8, 16))
        return model, tokens, tokens[:3, :4]

    monkeypatch.setattr(generation, "MODELS", {generation.TITLE: small})
    monkeypatch.setattr(generation, "NEW", 6)
    page = markdown([generation.measured(generation.TITLE, tmp_path)])
    assert "| plain | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | 3 of 3 |" in page
    each = r"\d\.\d\d \(\d\.\d\d to \d\.\d\d\) \|"
    assert re.search(rf"tokens\)` \| {each} {each} 3 of 3 \|\n", page)  # all V are exact
