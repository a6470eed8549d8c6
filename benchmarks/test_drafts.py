"""The page of benchmarks/drafts.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.drafts import Flat, agree, low_rank, report, words_of_a_round
from hstree.lm.table import markdown

RESULTS = Path(__file__).parent / "results"


def test_committed_page_shows_the_committed_figures() -> None:
    shown = report(json.loads((RESULTS / "drafts.json").read_text())["sections"])
    assert markdown(shown.tables, shown.notes) in (RESULTS / "drafts.md").read_text()


def test_words_of_a_round() -> None:
    assert words_of_a_round(0.5, 2) == 1 + 0.5 + 0.25
    assert words_of_a_round(1.0, 4) == pytest.approx(5)


def test_agreement() -> None:
    """A draft of full rank is the softmax itself; half of the words hold what they hold."""
    torch.manual_seed(0)
    linear, hidden = nn.Linear(8, 40), torch.randn(300, 8)
    softmax = Flat(linear.weight, linear.bias, 40).requires_grad_(False)
    acceptance, divergence = agree(softmax, low_rank(softmax, hidden, 8), hidden)
    assert acceptance == pytest.approx(1, abs=0.02)
    assert divergence == pytest.approx(0, abs=0.001)
    kept = torch.arange(20)
    part = Flat(softmax.weight[kept], softmax.bias[kept], 40, kept=kept)
    acceptance, divergence = agree(softmax, part, hidden)
    held = softmax.log_prob(hidden).exp()[:, :20].sum(1).mean()
    assert acceptance == pytest.approx(float(held), rel=1e-4)
    assert divergence == float("inf")
