"""The example of a recommender, at a small size, without napkinXC."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("recommender")
    monkeypatch.setattr(module, "TEST_ROWS", 200)
    return module


@pytest.mark.parametrize("own_words", [False, True])
def test_data_have_the_shape_that_is_promised(example: ModuleType, own_words: bool) -> None:
    train, test = example.make_data(2000, own_words)
    assert train[1].shape == (round(4 * 2000 / 5.45), 2000)
    assert test[0].shape == (200, 1000)
    assert train[1].sum() / train[1].shape[0] == pytest.approx(5.45, rel=0.05)
    np.testing.assert_allclose((train[0] ** 2).sum(1), train[0].sum(1), rtol=1e-6)  # 0 and 1
    groups = [set((row.indices % 20).tolist()) for row in train[1][:50]]
    assert all(len(group) == 1 for group in groups)


def test_a_head_learns(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Many times the precision of the most frequent labels, which is below 0.02."""
    threads = torch.get_num_threads()
    heads = dict(list(example.HEADS.items())[:1])
    monkeypatch.setattr(example, "HEADS", heads)
    example.main(["--labels", "2000", "--seconds", "3"])
    torch.set_num_threads(threads)
    *_, head, row = capsys.readouterr().out.splitlines()[-3:]
    assert head.startswith("| --- |")
    name, precision, *scores = (cell.strip() for cell in row.strip("|").split("|"))
    assert name == next(iter(heads))
    assert float(precision) > 0.1
    assert all(0 < float(score) <= 1 for score in scores[:-1])
