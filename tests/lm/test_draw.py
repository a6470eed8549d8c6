"""Text and pictures of the top levels."""

from __future__ import annotations

import struct
import sys
import zlib

import numpy as np
import pytest

from hstree.lm.report import draw_tree
from hstree.trees import Tree, describe, huffman_tree, random_tree

NESTED = ((0, 1), (2, (3, 4)))
FREQUENCIES = [8, 4, 2, 1, 1]
WORDS = ["the", "of", "cat", "dog", "cow"]


def png(path):
    """Width, height and decompressed pixels (with filter bytes) of a PNG file."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    pixels, i = b"", 8
    while i < len(data):
        (length,) = struct.unpack(">I", data[i : i + 4])
        if data[i + 4 : i + 8] == b"IDAT":
            pixels += data[i + 8 : i + 8 + length]
        i += 12 + length
    return width, height, zlib.decompress(pixels)


def test_describe():
    assert describe(Tree.from_nested(NESTED), FREQUENCIES, WORDS).splitlines() == [
        "5 classes under 4 inner nodes (4 binary), 2 to 3 on a path",
        "inner nodes visited: 2.40 on average over the classes, 2.12 by frequency",
        "entropy of the frequencies: 1.88 bits",
        "",
        "100.0%  5 classes:  the, of, cat, dog, cow",
        "├─ 75.0%  2 classes:  the, of",
        "│  ├─ 50.0%  the",
        "│  └─ 25.0%  of",
        "└─ 25.0%  3 classes:  cat, dog, cow",
        "   ├─ 12.5%  cat",
        "   └─ 12.5%  2 classes:  dog, cow",
        "      ├─ 6.25%  dog",
        "      └─ 6.25%  cow",
    ]


def test_describe_without_words_or_frequencies():
    lines = describe(Tree.from_nested(NESTED), levels=1).splitlines()
    assert lines[1:] == [
        "inner nodes visited: 2.40 on average over the classes",
        "",
        "100.0%  5 classes:  class 0, class 1, class 2, class 3, class 4",
        "├─ 40.0%  2 classes:  class 0, class 1",
        "└─ 60.0%  3 classes:  class 2, class 3, class 4",
    ]
    assert describe(Tree.from_nested(0)).splitlines()[0::3] == [
        "1 class under 0 inner nodes (0 binary), 0 to 0 on a path",
        "100.0%  class 0",
    ]
    assert "100.0%  5 classes" in describe(Tree.from_nested(NESTED), np.zeros(5), WORDS)


def test_describe_a_wide_root_shows_the_heaviest_words_and_clusters():
    nested = (*((10 + 2 * i, 11 + 2 * i) for i in range(5)), *range(10))
    frequencies = [100 - c for c in range(10)] + [5 + c for c in range(10)]
    lines = describe(Tree.from_nested(nested), frequencies, levels=1).splitlines()
    assert lines[0] == "20 classes under 6 inner nodes (5 binary, 1 wide), 1 to 2 on a path"
    shown = [line.split("%")[1].split() for line in lines[5:]]
    assert shown == [
        ["class", "0"],
        ["class", "1"],
        ["class", "2"],
        ["2", "classes:", "class", "19,", "class", "18"],
        ["2", "classes:", "class", "17,", "class", "16"],
        ["2", "classes:", "class", "15,", "class", "14"],
        ["…", "9", "more"],
    ]
    shares = [float(line.strip("├└─ ").split("%")[0]) for line in lines[5:]]
    assert sum(shares) == pytest.approx(100, abs=0.5)


def test_describe_cuts_long_lists_and_hides_control_characters():
    tree = random_tree(1000)
    words = [f"word-{c}" for c in range(1000)]
    lines = describe(tree, np.arange(1000), words).splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line.endswith(" …") for line in lines[4:])
    assert "word-999, word-998, word-997" in lines[4]
    shown = describe(Tree.from_nested((0, 1, 2, 3)), words=["a\nb", "\x1b[31m", "", "x" * 500])
    assert "a\\nb" in shown
    assert "\\x1b[31m" in shown
    assert "''" in shown
    assert "xxx…" in shown
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
        (random_tree(5000, root=256, leaf=8), None, None, 4),
        (random_tree(300, root=300), [f"{'long' * 40}{c}" for c in range(300)], None, 2),
    ],
    ids=["small", "unnamed", "one class", "hostile words", "chain", "deep", "wide", "flat"],
)
def test_draw(tmp_path, tree, words, frequencies, levels):
    path = tmp_path / "tree.png"
    pyplot_before = "matplotlib.pyplot" in sys.modules
    draw_tree(tree, words, path, levels, frequencies)
    width, height, pixels = png(path)
    assert 150 < width < 5000
    assert 100 < height < 2500
    assert len(set(pixels)) > 20  # not an empty page
    assert [p.name for p in tmp_path.iterdir()] == ["tree.png"]
    assert ("matplotlib.pyplot" in sys.modules) == pyplot_before


def test_more_levels_make_a_larger_picture(tmp_path):
    tree = random_tree(1000)
    sizes = []
    for levels in (1, 2, 3, 4):
        draw_tree(tree, None, tmp_path / "t.png", levels)
        sizes.append(png(tmp_path / "t.png")[:2])
    assert sizes == sorted(sizes)
    assert sizes[-1][1] > 2 * sizes[0][1]


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
