"""Loaders: exact token streams of small corpora, and errors that name file and place."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hstree.lm.data import Corpus, CorpusStatistics, load_corpus, load_held_out


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
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (13, 4, 4)
    assert corpus.train.dtype == corpus.valid.dtype == corpus.test.dtype == np.int32
    assert corpus.vocabulary.words == ("<eos>", "the", "sat", "<unk>", "cat", "dog", "ran")
    assert corpus.vocabulary.frequencies.tolist() == [4, 3, 2, 1, 1, 1, 1]


def test_statistics_count_the_training_part(folder: Path) -> None:
    corpus = load_corpus(folder, min_count=2)
    statistics = corpus.statistics()
    assert statistics.frequencies.tolist() == corpus.vocabulary.frequencies.tolist()
    assert np.array_equal(statistics.tokens, corpus.train)
    assert corpus.vocabulary.words == ("<eos>", "<unk>", "the", "sat")


def test_folder_with_a_given_vocabulary(folder: Path) -> None:
    small = load_corpus(folder, max_vocabulary=4).vocabulary
    corpus = load_corpus(folder, vocabulary=small)
    assert corpus.vocabulary is small
    assert words(corpus, "valid") == "the <unk> <unk> <eos>"


def test_load_corpus_takes_folders_and_files(folder: Path, tmp_path: Path) -> None:
    assert words(load_corpus(folder), "test") == "the <unk> sat <eos>"
    text = tmp_path / "one.txt"
    text.write_text("Some words, some more.\n" * 20)
    assert load_corpus(text).name == "one.txt"
    with pytest.raises(ValueError, match="absent: no such file or folder"):
        load_corpus(tmp_path / "absent")


def test_text_file_is_split_in_order(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    lines = [f"Line number {'even' if i % 2 == 0 else 'odd'}.\n\n" for i in range(100)]
    path.write_text("\ufeff" + "".join(lines), encoding="utf-8")
    corpus = load_corpus(path)
    assert (len(corpus.train), len(corpus.valid), len(corpus.test)) == (450, 25, 25)
    assert words(corpus, "train").startswith(
        "line number even . <eos> line number odd . <eos> line number even"
    )
    assert words(corpus, "test").endswith("line number odd . <eos>")
    assert sorted(corpus.vocabulary) == [".", "<eos>", "<unk>", "even", "line", "number", "odd"]


@pytest.mark.parametrize("kind", ["pipe", "named"])
def test_pipes_are_read_as_a_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a text is read several times; the copy is gone with its ids in the cache."""
    content = "".join(f"The cat number {i % 9} sat.\n" for i in range(2000)).encode()
    (tmp_path / "book.txt").write_bytes(content)
    text = load_corpus(tmp_path / "book.txt")
    options: Any = {"vocabulary": text.vocabulary, "tokenizer": text.tokenizer}
    held_out = load_held_out(tmp_path / "book.txt", **options)
    copies = tmp_path / "copies"
    copies.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))

    @contextmanager
    def sent(content: bytes) -> Iterator[str]:
        path = str(tmp_path / "fifo")
        if kind == "pipe":
            reader, writer = os.pipe()
            path = f"/dev/fd/{reader}"
        else:
            os.mkfifo(path)

        def write() -> None:
            with open(path if kind == "named" else writer, "wb") as file:
                file.write(content)

        send = threading.Thread(target=write)
        send.start()
        yield path
        send.join()
        os.close(reader) if kind == "pipe" else os.unlink(path)

    with sent(content) as path:
        corpus = load_corpus(path)
    assert corpus.vocabulary == text.vocabulary
    for split in ("train", "valid", "test"):
        assert np.array_equal(getattr(corpus, split), getattr(text, split))
    with sent(content) as path:
        scored = load_held_out(path, **options)
    assert np.array_equal(scored.parts["text"], held_out.parts["text"])
    assert scored.lengths == held_out.lengths
    with sent(b"a \xff") as path, pytest.raises(ValueError, match=f"{path}: not UTF-8 text"):
        load_corpus(path)
    with sent(b"") as path, pytest.raises(ValueError, match=f"{path}: the file is empty"):
        load_corpus(path)
    assert list(copies.iterdir()) == []
    with pytest.raises(ValueError, match="/dev/null: expected a file, a folder or a pipe"):
        load_corpus("/dev/null")


def test_rare_words_of_a_text_file_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("once a b\n" + "a b\n" * 40)
    corpus = load_corpus(path)
    assert "once" not in corpus.vocabulary
    assert words(corpus, "train").startswith("<unk> a b <eos> a b <eos>")
    assert "once" in load_corpus(path, min_count=1).vocabulary


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


def test_missing_files_are_listed(folder: Path) -> None:
    (folder / "valid.txt").unlink()
    (folder / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"missing valid.txt, test.txt"):
        load_corpus(folder)


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw"),
        ("train.txt", "val.txt", "test.txt"),
        ("train.txt", "validation.txt", "test.txt"),
    ],
    ids=lambda names: names[1],
)
def test_other_names_of_files(names: tuple[str, ...], folder: Path) -> None:
    """Beside files of other corpora, such as the characters of the Penn Treebank."""
    expected = load_corpus(folder)
    for split, name in zip(("train", "valid", "test"), names, strict=True):
        (folder / f"{split}.txt").rename(folder / name)
        (folder / f"ptb.char.{split}.txt").write_text("t h e\n")
    corpus = load_corpus(folder)
    assert corpus.vocabulary == expected.vocabulary
    for split in ("train", "valid", "test"):
        assert words(corpus, split) == words(expected, split)


def test_several_files_that_could_be_meant(folder: Path) -> None:
    (folder / "val.txt").write_text("another\n")
    assert words(load_corpus(folder), "valid") == "the cat ran <eos>"
    (folder / "valid.txt").rename(folder / "ptb.valid.txt")
    with pytest.raises(
        ValueError, match=r"for the part valid, got ptb.valid.txt, val.txt; name one"
    ):
        load_corpus(folder)


def test_an_end_that_is_there_is_not_doubled(folder: Path) -> None:
    expected = load_corpus(folder)
    for split in ("train", "valid", "test"):
        file = folder / f"{split}.txt"
        lines = file.read_text().splitlines()
        file.write_text("\n".join(f"{line} <eos>" for line in lines) + "\n")
    corpus = load_corpus(folder)
    assert corpus.vocabulary == expected.vocabulary
    for split in ("train", "valid", "test"):
        assert words(corpus, split) == words(expected, split)
    # The whole text in one line, as some distributions have it; its last word is an end.
    (folder / "train.txt").write_text(words(expected, "train"))
    assert words(load_corpus(folder), "train") == words(expected, "train")
    text = folder / "text.txt"
    text.write_text("Some words <eos>\nsome more.\n" * 20)
    assert words(load_corpus(text), "train").startswith("some words <eos> some more . <eos> some")


def test_lengths_are_those_of_the_files(folder: Path) -> None:
    (folder / "test.txt").write_text(" the b\u00efrd sat \u2014 \n\nno end", encoding="utf-8")
    for _ in range(2):  # made, and from the cache
        corpus = load_corpus(folder)
        for split in ("train", "valid", "test"):
            data = (folder / f"{split}.txt").read_bytes()
            assert corpus.lengths[split] == (len(data.decode()), len(data))
    assert corpus.lengths["test"].bytes == corpus.lengths["test"].characters + 3
    text = folder / "text.txt"
    text.write_text("some words\n" * 30)
    assert load_corpus(text).lengths == {}


def test_bad_text_files(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("two words\n")
    with pytest.raises(ValueError, match="3 tokens are too few to split"):
        load_corpus(path)
    with pytest.raises(ValueError, match="no such file"):
        load_corpus(tmp_path / "absent.txt")
    path.write_text("alone\n" * 50)
    with pytest.raises(ValueError, match="only 'alone'"):
        load_corpus(path)


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
    assert statistics.vectors(n_features=4).shape == (12, 4)
