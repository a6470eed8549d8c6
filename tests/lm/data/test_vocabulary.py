"""Vocabularies: order, limits, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hstree.lm.data import Vocabulary

COUNTS = {"b": 3, "a": 3, "<eos>": 4, "rare": 1, "c": 2}


@pytest.mark.parametrize(
    ("more", "limits", "expected"),
    [
        ({}, {}, {"<eos>": 4, "a": 3, "b": 3, "c": 2, "rare": 1, "<unk>": 0}),
        ({}, {"min_count": 2}, {"<eos>": 4, "a": 3, "b": 3, "c": 2, "<unk>": 1}),
        ({}, {"max_size": 4}, {"<eos>": 4, "<unk>": 3, "a": 3, "b": 3}),
        ({"<unk>": 7}, {"min_count": 2}, {"<unk>": 8, "<eos>": 4, "a": 3, "b": 3, "c": 2}),
    ],
    ids=["all", "min_count", "max_size", "<unk> of the text"],
)
def test_order_and_limits(
    more: dict[str, int], limits: dict[str, int], expected: dict[str, int]
) -> None:
    """By frequency, then alphabet; what is left out counts as unknown."""
    vocabulary = Vocabulary.from_counts(COUNTS | more, **limits)
    assert vocabulary.words == (*expected,)
    assert vocabulary.frequencies.tolist() == [*expected.values()]
    assert vocabulary.words[vocabulary.end] == "<eos>"
    assert vocabulary.words[vocabulary.unknown] == "<unk>"
    assert len(vocabulary) == len(expected)


def test_encode_and_decode() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    ids = vocabulary.encode(["a", "never", "<eos>"])
    assert ids == [1, 5, 0]
    assert vocabulary.decode(ids) == ["a", "<unk>", "<eos>"]
    assert vocabulary["a"] == 1
    assert "a" in vocabulary
    assert "never" not in vocabulary
    for wrong in ([6], [0, -1]):
        with pytest.raises(ValueError, match=r"ids: expected class ids in \[0, 6\), got \["):
            vocabulary.decode(wrong)


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts(COUNTS | {"naïve": 2, "字": 9, "\u00a1": 1, "#": 1})
    path = tmp_path / "words.txt"
    path.write_bytes(vocabulary.to_bytes())
    assert path.read_text(encoding="utf-8").startswith("字\t9\n<eos>\t4\na\t3\n")
    assert Vocabulary.load(path) == vocabulary
    assert Vocabulary.load(path) != Vocabulary.from_counts(COUNTS)


@pytest.mark.parametrize(
    ("counts", "limits", "message"),
    [
        ({}, {}, "at least two different words, the training text has none"),
        ({"a": 5, "<eos>": 2, "<unk>": 9}, {}, "at least two different words.* has only 'a'"),
        (COUNTS, {"min_count": 4}, "that occur at least 4 times.*has none"),
        (COUNTS, {"min_count": 0}, "min_count: expected a whole number of at least 1, got 0"),
        (COUNTS, {"max_size": 3}, "max_size: expected a whole number of at least 4, got 3"),
    ],
)
def test_bad_counts(counts: dict[str, int], limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary.from_counts(counts, **limits)


@pytest.mark.parametrize(
    ("words", "frequencies", "message"),
    [
        (["<unk>", "<eos>", "a"], [1, 2], r"frequencies: .* each of 3 words, got \[1, 2\]"),
        (["<unk>", "<eos>"], [1, -2], r"frequencies: .* at least 0 .*, got \[1, -2\]"),
        (["<unk>", "<eos>", "a b"], [1, 2, 3], r"words\[2\]: expected a word without white space"),
        (["<unk>", "<eos>", ""], [1, 2, 3], r"words\[2\]: expected a word"),
        (["<unk>", "<eos>", "<unk>"], [1, 2, 3], r"words\[2\]: '<unk>' is already words\[0\]"),
        (["<unk>", "b", "a"], [1, 2, 3], "the marker <eos> is missing"),
    ],
)
def test_bad_words_are_named(words: list[str], frequencies: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(words, frequencies)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<unk>\t1\n<eos>\t2\na\t3", "truncated"),
        (b"<unk>\t1\n<eos>\n", "line 2: expected word<TAB>frequency.* got '<eos>'"),
        (b"<unk>\t1\n<eos>\tmany\n", "line 2: expected word<TAB>frequency"),
        (b"<unk>\t1\n<eos>\t1234567890123456789\n", "line 2: .* of at most 18 digits"),
        (b"<unk>\t1\n\xff\t2\n", "can't decode byte 0xff in position 8"),
        (b"a\t1\nb\t2\n", "marker <unk> is missing"),
        (b"", "truncated"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        Vocabulary.load(path)
    assert str(caught.value).startswith(f"{path}: not a vocabulary file: ")
