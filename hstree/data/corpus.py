"""Corpora as streams of class ids, and the loaders that make them from text files."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .statistics import CorpusStatistics
from .text import tokenize
from .vocabulary import END, Vocabulary

SPLITS = ("train", "valid", "test")
_TRAIN_SHARE, _VALID_SHARE = 0.90, 0.05


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, as class ids of one vocabulary.

    Attributes:
        name: what people call it.
        vocabulary: its words; frequencies are those of the training part.
        train, valid, test: int32 streams of class ids; lines follow each other, each ends with
            ``<eos>``.
    """

    name: str
    vocabulary: Vocabulary
    train: npt.NDArray[np.int32]
    valid: npt.NDArray[np.int32]
    test: npt.NDArray[np.int32]

    def statistics(self) -> CorpusStatistics:
        """Class frequencies and token stream of the training part."""
        return CorpusStatistics.from_tokens(self.train, len(self.vocabulary))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(getattr(self, split)):,}" for split in SPLITS)
        return f"Corpus({self.name}: {sizes} tokens, {len(self.vocabulary):,} types)"


class _Interner:
    """Numbers words in order of first appearance, so that a text is read once."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def encode(self, lines: Iterable[list[str]]) -> npt.NDArray[np.int32]:
        index = self.index
        ids = array("i")
        for words in lines:
            ids.extend([index.setdefault(word, len(index)) for word in words])
            ids.append(index.setdefault(END, len(index)))
        return np.array(ids, dtype=np.int32)

    def counts(self, ids: npt.NDArray[np.int32]) -> dict[str, int]:
        counts = np.bincount(ids, minlength=len(self.index)).tolist()
        return {word: counts[position] for word, position in self.index.items() if counts[position]}

    def class_ids(self, vocabulary: Vocabulary) -> npt.NDArray[np.int32]:
        """Class id of every interned word."""
        return np.array(vocabulary.encode(self.index), dtype=np.int32)


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 file (a byte order mark is skipped). Raises ValueError that names the first
    byte that is not."""
    offset = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                position = error.start + (
                    3 if number == 1 and raw.startswith(b"\xef\xbb\xbf") else 0
                )
                raise ValueError(
                    f"{path}: not UTF-8 text: byte 0x{raw[position]:02x} at offset "
                    f"{offset + position} (line {number})"
                ) from None
            offset += len(raw)
            yield line


def _read_words(
    path: Path, split_line: Callable[[str], list[str]], *, keep_empty: bool
) -> Iterator[list[str]]:
    any_words = False
    for line in read_lines(path):
        words = split_line(line)
        any_words = any_words or bool(words)
        if words or keep_empty:
            yield words
    if not any_words:
        what = "is empty" if path.stat().st_size == 0 else "has no words"
        raise ValueError(f"{path}: the file {what}")


def load_folder(
    path: str | os.PathLike[str],
    *,
    min_count: int = 1,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """A corpus that is tokenised already: ``train.txt``, ``valid.txt`` and ``test.txt`` in one
    folder.

    The layout of the Penn Treebank and WikiText distributions for language models: words are
    separated by white space, every line ends with ``<eos>``, an empty line too. Words of ``valid``
    and ``test`` that are not in the vocabulary become ``<unk>``.

    Args:
        path: the folder.
        min_count, max_vocabulary: as in :meth:`Vocabulary.from_counts`.
        vocabulary: encode with this vocabulary instead of that of ``train.txt``.

    Raises:
        ValueError: a file is missing, empty or not UTF-8, or the vocabulary has fewer than two
            words.
    """
    folder = Path(path)
    files = {split: folder / f"{split}.txt" for split in SPLITS}
    missing = [file.name for file in files.values() if not file.is_file()]
    if missing:
        raise ValueError(
            f"{folder}: expected train.txt, valid.txt and test.txt in this folder, "
            f"missing {', '.join(missing)}"
        )
    interner = _Interner()
    parts = {
        split: interner.encode(_read_words(file, str.split, keep_empty=True))
        for split, file in files.items()
    }
    return _encode(folder.resolve().name, interner, parts, min_count, max_vocabulary, vocabulary)


def load_text(
    path: str | os.PathLike[str],
    *,
    min_count: int = 2,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """Any UTF-8 text file as a corpus.

    Lines are tokenised by :func:`hstree.data.tokenize` (lower-cased words and punctuation marks)
    and end with ``<eos>``; empty lines are skipped. The first 90% of the tokens are the training
    part, the next 5% the validation part and the last 5% the test part. Words that the training
    part holds fewer than ``min_count`` times become ``<unk>``. To keep case or another
    tokenisation, prepare a folder for :func:`load_folder`.

    Raises:
        ValueError: the file is missing, empty, too short to split, or not UTF-8, or the vocabulary
            has fewer than two words.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    interner = _Interner()
    tokens = interner.encode(_read_words(file, tokenize, keep_empty=False))
    first = int(len(tokens) * _TRAIN_SHARE)
    second = int(len(tokens) * (_TRAIN_SHARE + _VALID_SHARE))
    parts = {"train": tokens[:first], "valid": tokens[first:second], "test": tokens[second:]}
    if min(len(part) for part in parts.values()) < 2:
        raise ValueError(
            f"{file}: {len(tokens)} tokens are too few to split 90% / 5% / 5%; expected at least 40"
        )
    return _encode(file.name, interner, parts, min_count, max_vocabulary, vocabulary)


def corpus_from_lines(
    name: str,
    lines: dict[str, list[list[str]]],
    *,
    min_count: int = 1,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """A corpus from words in memory: for each of train, valid and test its lines, each a list of
    words."""
    interner = _Interner()
    parts = {split: interner.encode(lines[split]) for split in SPLITS}
    return _encode(name, interner, parts, min_count, max_vocabulary, vocabulary)


def _encode(
    name: str,
    interner: _Interner,
    parts: dict[str, npt.NDArray[np.int32]],
    min_count: int,
    max_vocabulary: int | None,
    vocabulary: Vocabulary | None,
) -> Corpus:
    if vocabulary is None:
        counts = interner.counts(parts["train"])
        try:
            vocabulary = Vocabulary.from_counts(
                counts, min_count=min_count, max_size=max_vocabulary
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    class_ids = interner.class_ids(vocabulary)
    return Corpus(name, vocabulary, *(class_ids[parts[split]] for split in SPLITS))
