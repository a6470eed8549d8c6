"""The figures of benchmarks/screened.py, where they are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.screened import judge, measure_times, others, products, screen
from hstree.heads import ScreenedSoftmax


@torch.no_grad()
def test_contestants_of_a_small_layer() -> None:
    torch.manual_seed(0)
    linear, hidden = nn.Linear(32, 640, bias=False), 9 * torch.randn(300, 32)
    exact = lambda x: linear(x).log_softmax(1)  # noqa: E731
    assert judge(linear, exact, hidden) == pytest.approx((1, 1))
    overlap = {one.name: one.overlap or 0.0 for one in others(linear, hidden, hidden)}
    assert 0.9 > overlap["160 words"] > overlap["40 words"] > 1 / 16
    head = ScreenedSoftmax.from_linear(linear, hidden, rank=32, bits=4, exact=64)
    one = screen(linear, head)
    assert one.bytes == pytest.approx(4 / 32 + 64 / 640)
    contestants = [*products(linear), one]
    measure_times(contestants, hidden)
    assert len(one.times) == 4
    assert all(time == 1 for unit in contestants[:2] for time in unit.times.values())
