"""Text and pictures of the top levels."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from matplotlib.image import imread

from hstree.lm.report import draw_tree
from hstree.trees import Tree, describe, huffman_tree, random_tree

NESTED = ((0, 1), (2, (3, 4)))
FREQUENCIES = [8, 4, 2, 1, 1]
WORDS = ["the", "of", "cat", "dog", "cow"]


def test_describe():
    assert describe(Tree.from_nested(NESTED), FREQUENCIES, WORDS).splitlines() == [
        "classes 5, inner nodes 4 (0 wide), on a path 2 to 3, on average 2.40",
        "100%  5 classes: the, of, cat, dog, cow",
        "├─ 75%  2 classes: the, of",
        "│  ├─ 50%  the",
        "│  └─ 25%  of",
        "└─ 25%  3 classes: cat, dog, cow",
        "   ├─ 12.5%  cat",
        "   └─ 12.5%  2 classes: dog, cow",
        "      ├─ 6.25%  dog",
        "      └─ 6.25%  cow",
    ]


def test_describe_without_words_or_frequencies():
    assert describe(Tree.from_nested(NESTED), levels=1).splitlines()[1:] == [
        "100%  5 classes: #0, #1, #2, #3, #4",
        "├─ 60%  3 classes: #2, #3, #4",
        "└─ 40%  2 classes: #0, #1",
    ]
    assert describe(Tree.from_nested(0)).splitlines() == [
        "classes 1, inner nodes 0 (0 wide), on a path 0 to 0, on average 0.00",
        "100%  #0",
    ]
    assert "100%  5 classes" in describe(Tree.from_nested(NESTED), np.zeros(5), WORDS)


def test_describe_a_wide_root_shows_its_heaviest_children():
    nested = (*((10 + 2 * i, 11 + 2 * i) for i in range(5)), *range(10))
    frequencies = [100 - c for c in range(10)] + [10 * c for c in range(10)]
    lines = describe(Tree.from_nested(nested), frequencies, levels=1).splitlines()
    assert lines[0].startswith("classes 20, inner nodes 6 (1 wide), on a path 1 to 2")
    masses = {f"#{c}": 100 - c for c in range(10)}
    masses |= {f"2 classes: #{19 - 2 * i}, #{18 - 2 * i}": 170 - 40 * i for i in range(5)}
    heaviest = sorted(masses, key=lambda name: -masses[name])
    shown = [name for name in heaviest if name[0] == "#"][:6]
    shown += [name for name in heaviest if name[0] != "#"]
    assert [line.split("%  ")[1] for line in lines[2:]] == [*shown, "… 4 more"]
    shares = [float(line.strip("├└─ ").split("%")[0]) for line in lines[2:]]
    assert shares[6] == pytest.approx(100 * 170 / sum(frequencies), abs=0.05)
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_describe_is_short_and_hides_control_characters():
    tree = random_tree(1000)
    words = [f"word-{c}" for c in range(1000)]
    for levels in (3, 50):
        lines = describe(tree, np.arange(1000), words, levels).splitlines()
        assert max(map(len, lines)) <= 80 + 3 * levels
        assert len(lines) < 80
        assert all(line.endswith(" …") for line in lines[1:4])
        assert "word-999, word-998, word-997" in lines[1]
    shown = describe(Tree.from_nested((0, 1, 2, 3)), words=["a\nb", "\x1b[31m", "", "x" * 500])
    assert "'a\\nb'" in shown
    assert "'\\x1b[31m'" in shown
    assert "''" in shown
    assert "x" * 45 not in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("tree", "words", "frequencies", "levels"),
    [
        (Tree.from_nested(NESTED), WORDS, FREQUENCIES, 4),
        (Tree.from_nested(NESTED), None, None, 1),
        (Tree.from_nested(0), ["only"], [0], 4),
        (Tree.from_nested((0, 1, 2)), ["$a$", "\\frac{x}{", "漢字 \n"], None, 4),
        (huffman_tree(2.0 ** np.arange(60)), None, 2.0 ** np.arange(60), 30),
        (random_tree(5000), None, None, 9),
        (random_tree(5000, clusters=256), None, None, 4),
        (random_tree(300, clusters=300), [f"{'long' * 40}{c}" for c in range(300)], None, 2),
    ],
    ids=["small", "unnamed", "one class", "hostile words", "chain", "deep", "wide", "flat"],
)
def test_draw(tmp_path, tree, words, frequencies, levels):
    path = tmp_path / "tree.png"
    pyplot_before = "matplotlib.pyplot" in sys.modules
    draw_tree(tree, words, path, levels, frequencies)
    pixels = imread(path)
    assert 80 < pixels.shape[0] < 2500
    assert 150 < pixels.shape[1] < 5000
    assert len(np.unique(pixels)) > 20  # not an empty page
    assert [p.name for p in tmp_path.iterdir()] == ["tree.png"]
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before


def test_errors(tmp_path):
    tree = Tree.from_nested(NESTED)
    with pytest.raises(ValueError, match="words: expected 5 words, got 2"):
        draw_tree(tree, ["a", "b"], tmp_path / "t.png")
    with pytest.raises(ValueError, match="words: expected 5 words, got 0"):
        describe(tree, words=[])
    with pytest.raises(ValueError, match="levels: expected a whole number of at least 1, got 0"):
        draw_tree(tree, None, tmp_path / "t.png", levels=0)
    with pytest.raises(ValueError, match=r"frequencies: .* shape \(5,\), got shape \(1,\)"):
        describe(tree, [1])
    with pytest.raises(FileNotFoundError):
        draw_tree(tree, None, tmp_path / "absent" / "t.png")
    assert list(tmp_path.iterdir()) == []
