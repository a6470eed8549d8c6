"""Vocabularies: order, limits, files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hstree.lm.data import Vocabulary

COUNTS = {"b": 3, "a": 3, "<eos>": 4, "rare": 1, "c": 2}


def test_ids_follow_frequency_then_alphabet() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    assert vocabulary.words == ("<eos>", "a", "b", "c", "rare", "<unk>")
    assert vocabulary.frequencies.tolist() == [4, 3, 3, 2, 1, 0]
    assert (vocabulary.end, vocabulary.unknown, len(vocabulary)) == (0, 5, 6)


def test_what_is_left_out_counts_as_unknown() -> None:
    by_count = Vocabulary.from_counts(COUNTS, min_count=2)
    assert by_count.words == ("<eos>", "a", "b", "c", "<unk>")
    assert by_count.frequencies.tolist() == [4, 3, 3, 2, 1]
    by_size = Vocabulary.from_counts(COUNTS, max_size=4)
    assert by_size.words == ("<eos>", "<unk>", "a", "b")
    assert by_size.frequencies.sum() == sum(COUNTS.values())


def test_unknown_of_the_text_itself_is_kept() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS | {"<unk>": 7}, min_count=2)
    assert vocabulary.frequencies[vocabulary.unknown] == 7 + 1


def test_encode_and_decode() -> None:
    vocabulary = Vocabulary.from_counts(COUNTS)
    ids = vocabulary.encode(["a", "never", "<eos>"])
    assert ids == [1, 5, 0]
    assert vocabulary.decode(ids) == ["a", "<unk>", "<eos>"]
    assert "a" in vocabulary
    assert "never" not in vocabulary
    with pytest.raises(ValueError, match=r"expected class ids in \[0, 6\), got 6"):
        vocabulary.decode([6])


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    vocabulary = Vocabulary.from_counts(COUNTS | {"naïve": 2, "字": 9, "\u00a1": 1, "#": 1})
    vocabulary.save(tmp_path / "words.txt")
    assert (
        (tmp_path / "words.txt").read_text(encoding="utf-8").startswith("字\t9\n<eos>\t4\na\t3\n")
    )
    loaded = Vocabulary.load(tmp_path / "words.txt")
    assert loaded == vocabulary
    assert loaded.frequencies.dtype == vocabulary.frequencies.dtype


@pytest.mark.parametrize("counts", [{}, {"a": 5}, {"a": 5, "<eos>": 2, "<unk>": 9}])
def test_one_word_is_no_vocabulary(counts: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least two different words"):
        Vocabulary.from_counts(counts)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"that occur at least 4 times.*has none"):
        Vocabulary.from_counts(COUNTS, min_count=4)
    with pytest.raises(ValueError, match="min_count: expected at least 1, got 0"):
        Vocabulary.from_counts(COUNTS, min_count=0)
    with pytest.raises(ValueError, match="max_size: expected at least 4"):
        Vocabulary.from_counts(COUNTS, max_size=3)


@pytest.mark.parametrize(
    ("words", "frequencies", "message"),
    [
        (["<unk>", "<eos>", "a"], [1, 2], "one count for each of 3 words, got 2"),
        (["<unk>", "<eos>", "a b"], [1, 2, 3], r"words\[2\]: expected a word without white space"),
        (["<unk>", "<eos>", ""], [1, 2, 3], r"words\[2\]: expected a word"),
        (["<unk>", "<eos>", "<unk>"], [1, 2, 3], r"words\[2\]: '<unk>' is already words\[0\]"),
        (["<unk>", "b", "a"], [1, 2, 3], "the marker <eos> is missing"),
        (["<unk>", "<eos>"], [1, -2], r"frequencies\[1\]: expected at least 0, got -2"),
    ],
)
def test_bad_words_are_named(words: list[str], frequencies: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary(words, frequencies)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<unk>\t1\n<eos>\t2\na\t3", "truncated"),
        (b"<unk>\t1\n<eos>\n", "line 2: expected word<TAB>frequency, got '<eos>'"),
        (b"<unk>\t1\n<eos>\tmany\n", "line 2: expected word<TAB>frequency"),
        (b"<unk>\t1\n\xff\t2\n", "byte 8 is not UTF-8"),
        (b"a\t1\nb\t2\n", "marker <unk> is missing"),
        (b"", "truncated"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        Vocabulary.load(path)
    assert str(path) in str(caught.value)
