"""The page of benchmarks/bounded_groups.py, of a small vocabulary."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import bounded_groups
from benchmarks.bounded_groups import Size, group_sizes
from hstree.heads import TreeEnsemble
from hstree.lm.report import markdown
from hstree.trees import Tree

V = 3000
SIZE = Size(features=8, windows=2, window=8, rounds=2, steps=3, seeds=(1,), held_out=64)


@pytest.fixture(scope="module")
def text() -> tuple[bounded_groups.Tokens, bounded_groups.Tokens]:
    """Two texts of Zipf's law over a third of the classes."""
    mass = 1 / np.arange(1.0, V // 3 + 1)
    drawn = np.random.default_rng(0).choice(V // 3, 20_000, p=mass / mass.sum())
    return drawn[:10_000], drawn[10_000:]


def test_group_sizes() -> None:
    assert group_sizes(Tree.from_nested((2, (0, 4, 1), (3, 5)))).tolist() == [3, 3, 0, 2, 3, 2]


def test_trees_are_those_of_the_constructors(
    text: tuple[bounded_groups.Tokens, bounded_groups.Tokens],
) -> None:
    counts = np.bincount(text[0], minlength=V)
    of_counts = TreeEnsemble.from_counts(8, counts)
    of_text = TreeEnsemble.from_tokens(8, V, torch.from_numpy(text[0]))
    for head, recipe in ((of_counts, "huffman"), (of_text, "cluster")):
        plain = bounded_groups.binary_trees(recipe, text[0], V)
        assert bounded_groups.collapsed(plain, text[0]) == head.trees
        made = bounded_groups.make_head(head.trees, text[0], SIZE)
        assert {name: p.shape for name, p in made.named_parameters()} == {
            name: p.shape for name, p in head.named_parameters()
        }


def test_page(text: tuple[bounded_groups.Tokens, bounded_groups.Tokens]) -> None:
    report = bounded_groups.report(text, V, SIZE)
    page = markdown(report.tables, report.notes)
    rows = re.findall(
        r"^\| (no bound|bound) \| 256 \| ([\d,]+) \| [\d.]+ \| ([\d.]+) \|", page, re.M
    )
    assert [name for name, *_ in rows] == 2 * ["no bound", "bound"]
    assert all(share == "1.00" for name, _, share in rows if name == "no bound")
    most = {name: [int(size.replace(",", "")) for n, size, _ in rows if n == name]
            for name in ("no bound", "bound")}  # fmt: skip
    assert min(most["no bound"]) > 220 >= max(most["bound"])
    assert "V = 3,000" in page
    assert f"{V - len(np.unique(text[0])):,} classes do not occur" in page


def test_record() -> None:
    """With the bound a step takes at most 0.7 of the time, and the loss is not higher."""
    page = (Path(__file__).parent / "results" / "bounded_groups.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "bound | 256" in line]
    assert len(rows) == 4
    for (*_, before_1, before_2), bound in zip(rows[::2], rows[1::2], strict=True):
        name, root, largest, _, share, _, rare, _, loss_1, loss_2 = bound
        assert (name, int(root)) == ("bound", 256)
        assert int(largest) <= 4 * math.sqrt(bounded_groups.CLASSES)
        assert float(share) <= 0.7
        assert float(rare) <= 0.1
        assert float(loss_1) <= float(before_1)
        assert float(loss_2) <= float(before_2)
