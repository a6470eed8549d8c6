"""Loaders: exact token streams of small corpora, and errors that name file and place."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hstree.lm.data import Corpus, CorpusStatistics, WhiteSpace, load_corpus, load_held_out

PARTS = ("train", "valid", "test")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    # Leading spaces, an empty line, a Windows line end and a missing last one are met in the wild.
    (path / "train.txt").write_bytes(b" the cat sat \n the dog sat\n\n the <unk> ran \r\n")
    (path / "valid.txt").write_bytes(b" the cat ran \n")
    (path / "test.txt").write_bytes(b" the bird sat")
    return path


def words(corpus: Corpus, split: str) -> str:
    return " ".join(corpus.vocabulary.decode(getattr(corpus, split).tolist()))


def test_folder_token_by_token(folder: Path) -> None:
    corpus = load_corpus(folder)
    assert corpus.name == "tiny"
    assert words(corpus, "train") == (
        "the cat sat <eos> the dog sat <eos> <eos> the <unk> ran <eos>"
    )
    assert words(corpus, "valid") == "the cat ran <eos>"
    assert words(corpus, "test") == "the <unk> sat <eos>"
    assert corpus.train.dtype == corpus.valid.dtype == corpus.test.dtype == np.int32
    assert corpus.vocabulary.words == ("<eos>", "the", "sat", "<unk>", "cat", "dog", "ran")
    assert corpus.vocabulary.frequencies.tolist() == [4, 3, 2, 1, 1, 1, 1]
    small = load_corpus(folder, min_count=2)
    assert small.vocabulary.words == ("<eos>", "<unk>", "the", "sat")
    statistics = small.statistics()
    assert statistics.frequencies.tolist() == small.vocabulary.frequencies.tolist()
    assert np.array_equal(statistics.tokens, small.train)
    again = load_corpus(folder, vocabulary=load_corpus(folder, max_vocabulary=4).vocabulary)
    assert words(again, "valid") == "the <unk> <unk> <eos>"


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.val.raw", "wiki.test.raw"),
        ("train.txt", "validation.txt", "test.txt"),
    ],
    ids=lambda names: names[1],
)
def test_other_names_of_files(names: tuple[str, ...], folder: Path) -> None:
    """Beside files of other corpora, such as the characters of the Penn Treebank."""
    expected = load_corpus(folder)
    for split, name in zip(PARTS, names, strict=True):
        (folder / f"{split}.txt").rename(folder / name)
        (folder / f"ptb.char.{split}.txt").write_text("t h e\n")
    assert load_corpus(folder).vocabulary == expected.vocabulary
    assert load_corpus(folder).fingerprint() == expected.fingerprint()


def test_several_files_that_could_be_meant(folder: Path) -> None:
    (folder / "val.txt").write_text("another\n")
    assert words(load_corpus(folder), "valid") == "the cat ran <eos>"
    (folder / "valid.txt").rename(folder / "ptb.valid.txt")
    message = r"for the part valid, got ptb.valid.txt, val.txt; name one of them valid.txt"
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)


def test_text_file_is_split_in_order(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    lines = [f"Line number {'even' if i % 2 == 0 else 'odd'}.\n\n" for i in range(100)]
    path.write_text("\ufeff" + "".join(lines).rstrip(), encoding="utf-8")
    corpus = load_corpus(path)
    assert corpus.name == "book.txt"
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (450, 25, 25)
    assert words(corpus, "train").startswith(
        "line number even . <eos> line number odd . <eos> line number even"
    )
    assert words(corpus, "test").endswith("line number odd . <eos>")
    assert sorted(corpus.vocabulary.words) == [
        ".",
        "<eos>",
        "<unk>",
        "even",
        "line",
        "number",
        "odd",
    ]
    path.write_text("once a b\n" + "a b\n" * 40)
    corpus = load_corpus(path)
    assert "once" not in corpus.vocabulary
    assert words(corpus, "train").startswith("<unk> a b <eos> a b <eos>")
    assert "once" in load_corpus(path, min_count=1).vocabulary


@pytest.mark.parametrize("letter", ["a", "ж"])
def test_a_text_in_one_line(letter: str, tmp_path: Path) -> None:
    """It is read in pieces, which end between words."""
    path = tmp_path / "line.txt"
    text = [letter * (1 + i % 9) for i in range(150_000)]
    path.write_text(" ".join(text), encoding="utf-8")
    corpus = load_corpus(path, tokenizer=WhiteSpace())
    assert " ".join(words(corpus, part) for part in PARTS).split() == [*text, "<eos>"]
    path.write_text(letter * 600_000, encoding="utf-8")  # a word beyond all bounds
    options = {"vocabulary": corpus.vocabulary, "tokenizer": WhiteSpace()}
    assert load_held_out(path, **options).parts["text"][-1] == corpus.vocabulary.end


def test_an_end_that_is_there_is_not_doubled(folder: Path) -> None:
    expected = load_corpus(folder)
    for split in PARTS:
        file = folder / f"{split}.txt"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(f"{line} <eos>" for line in lines) + "\n")
    assert load_corpus(folder).vocabulary == expected.vocabulary
    assert load_corpus(folder).fingerprint() == expected.fingerprint()
    # The whole text in one line, as some distributions have it; its last word is an end.
    (folder / "train.txt").write_text(words(expected, "train"))
    assert words(load_corpus(folder), "train") == words(expected, "train")
    text = folder / "text.txt"
    text.write_text("Some words <eos>\nsome more.\n" * 20)
    assert words(load_corpus(text), "train").startswith("some words <eos> some more . <eos> some")


def test_held_out_parts(folder: Path) -> None:
    """One suffices; of a file it is all of it."""
    vocabulary = load_corpus(folder).vocabulary
    options = {"vocabulary": vocabulary, "tokenizer": WhiteSpace()}
    (folder / "train.txt").unlink()
    assert [*load_held_out(folder, **options).parts] == ["valid", "test"]
    (folder / "valid.txt").unlink()
    text = load_held_out(folder, **options)
    assert vocabulary.decode(text.parts["test"].tolist()) == ["the", "<unk>", "sat", "<eos>"]
    alone = load_held_out(folder / "test.txt", **options)
    assert alone.parts["text"].tolist() == text.parts["test"].tolist()
    assert alone.lengths == {"text": (13, 13)}
    (folder / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"tiny: .* valid.txt or test.txt, .* are none"):
        load_held_out(folder, **options)


def test_lengths_are_those_of_the_files(folder: Path) -> None:
    (folder / "test.txt").write_text(" the b\u00efrd sat \u2014 \n\nno end", encoding="utf-8")
    for _ in range(2):  # made, and from the cache
        corpus = load_corpus(folder)
        for split in PARTS:
            data = (folder / f"{split}.txt").read_bytes()
            assert corpus.lengths[split] == (len(data.decode()), len(data))
    assert corpus.lengths["test"].bytes == corpus.lengths["test"].characters + 3
    text = folder / "text.txt"
    text.write_text("some words\n" * 30)
    assert load_corpus(text).lengths == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train.txt: the file is empty"),
        (b" \n\n \n", "train.txt: the file has no words"),
        (b"good line\nbad \xff byte\n", r"train.txt: not UTF-8.*0xff at offset 14 \(line 2\)"),
        (b"\xef\xbb\xbfbom \xfe", r"not UTF-8.*0xfe at offset 7 \(line 1\)"),
        ("text".encode("utf-16"), r"not UTF-8.*0xff at offset 0 \(line 1\)"),
        (b"a a a\na a\n", "tiny: .*at least two different words.*only 'a'"),
    ],
)
def test_bad_training_files(folder: Path, content: bytes, message: str) -> None:
    (folder / "train.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)


def test_bad_places(folder: Path, tmp_path: Path) -> None:
    (folder / "valid.txt").unlink()
    (folder / "test.txt").unlink()
    message = (
        r"tiny: expected the parts train.txt, valid.txt, test.txt, "
        r"missing valid.txt, test.txt; there are train"
    )
    with pytest.raises(ValueError, match=message):
        load_corpus(folder)
    with pytest.raises(ValueError, match=r"absent: no such file or folder"):
        load_corpus(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: expected a file or a folder"):
        load_corpus(tmp_path / "pipe")
    path = tmp_path / "short.txt"
    path.write_text("two words\n")
    with pytest.raises(ValueError, match=r"short\.txt: 3 tokens are too few to split"):
        load_corpus(path)
    for place in (path, folder, None):
        with pytest.raises(ValueError, match="--column: expected a text with columns, got "):
            load_corpus(place, column="text")


def test_unigram_loss_against_its_definition() -> None:
    statistics = CorpusStatistics.from_tokens(np.array([0, 0, 1, 0, 3]), 4)
    assert statistics.frequencies.tolist() == [3, 1, 0, 1]
    probability = np.array([3, 1, 0.5, 1]) / 5.5
    expected = -np.log(probability[[0, 2, 3]]).mean()
    assert statistics.unigram_loss(np.array([0, 2, 3])) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ValueError, match=r"expected ids in \[0, 4\)"):
        CorpusStatistics.from_tokens(np.array([4]), 4)


def test_vectors_are_those_of_the_trees() -> None:
    from hstree.trees import word_vectors

    tokens = np.random.default_rng(0).integers(12, size=500)
    statistics = CorpusStatistics.from_tokens(tokens, 12)
    vectors = statistics.vectors(context="both", n_features=5)
    expected = word_vectors(tokens, 12, context="both", n_features=5)
    np.testing.assert_array_equal(vectors, expected)
