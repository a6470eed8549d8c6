"""Corpora as streams of class ids, and the loaders that make them from text files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from hstree._progress import Task

from . import cache
from .cache import Length
from .source import (
    HELD_OUT,
    SPLITS,
    TRAIN_SHARE,
    VALID_SHARE,
    WHOLE,
    Part,
    Source,
    file_source,
    folder_source,
)
from .statistics import CorpusStatistics
from .tokenizer import Subwords, Tokenizer, WhiteSpace, Words, learn_bpe
from .vocabulary import END, Vocabulary

_BATCH_CHARACTERS = 1 << 17
_BLOCK = 1 << 18  # tokens


@dataclass(frozen=True)
class Corpus:
    """A text in three parts, as class ids of one vocabulary.

    Attributes:
        name: a name for people.
        vocabulary: words, with their frequencies in the training part.
        train, valid, test: class ids of the three parts, int32 read-only memory maps; every line
            ends with ``<eos>``.
        tokenizer: the tokenizer that has split the lines.
        lengths: characters and bytes of each part before tokenization, line ends included; empty
            if the parts were cut out of one file, between any two tokens.
    """

    name: str
    vocabulary: Vocabulary
    train: npt.NDArray[np.int32]
    valid: npt.NDArray[np.int32]
    test: npt.NDArray[np.int32]
    tokenizer: Tokenizer = field(default_factory=WhiteSpace)
    lengths: Mapping[str, Length] = field(default_factory=dict)

    def held_out(self) -> HeldOut:
        """The validation and the test part."""
        parts = {split: getattr(self, split) for split in HELD_OUT}
        return HeldOut(self.name, parts, self.lengths)

    def statistics(self) -> CorpusStatistics:
        """Class frequencies and token stream of the training part."""
        return CorpusStatistics.from_tokens(self.train, len(self.vocabulary))

    def fingerprint(self) -> str:
        """SHA-256 of the class ids of the three parts."""
        digest = hashlib.sha256()
        for split in SPLITS:
            part = getattr(self, split)
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{split} {len(getattr(self, split)):,}" for split in SPLITS)
        return f"Corpus({self.name}: {sizes} tokens, {len(self.vocabulary):,} types)"


@dataclass(frozen=True)
class HeldOut:
    """A text to score, as class ids.

    Attributes:
        name: a name for people.
        parts: class ids of ``valid`` and ``test``, or of one of them, or of a whole file as
            ``text``.
        lengths: as of :class:`Corpus`.
    """

    name: str
    parts: Mapping[str, npt.NDArray[np.int32]]
    lengths: Mapping[str, Length]


@dataclass(frozen=True)
class Settings:
    """How a text becomes a corpus.

    Attributes:
        tokenizer: splits the lines, or ``"bpe"``: :func:`hstree.data.learn_bpe`.
        min_count, max_vocabulary: as in :meth:`Vocabulary.from_counts`.
        vocabulary: use this vocabulary; the two limits are then ignored.

    Raises:
        ValueError: ``"bpe"`` together with a vocabulary.
    """

    tokenizer: Tokenizer | Literal["bpe"]
    min_count: int = 1
    max_vocabulary: int | None = None
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokenizer, str) and self.vocabulary is not None:
            raise ValueError(
                f"tokenizer: expected the one that made the vocabulary, got {self.tokenizer!r}"
            )

    def key(self, content: str) -> str:
        """A name for the corpus that these settings make from a text with the given fingerprint."""
        tokenizer = self.tokenizer if isinstance(self.tokenizer, str) else self.tokenizer.identity
        if self.vocabulary is not None:
            return _entry_key(content, tokenizer, self.vocabulary)
        return cache.key(content, tokenizer, self.min_count, self.max_vocabulary)


def load_folder(
    path: str | os.PathLike[str],
    *,
    min_count: int = 1,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """A corpus in three parts: ``train.txt``, ``valid.txt`` and ``test.txt`` in one folder.

    The layout of the Penn Treebank and WikiText distributions for language models: words are
    separated by white space, and every line, even an empty one, ends with ``<eos>``, which is added
    unless it is there. Words of ``valid`` and ``test`` that are not in the vocabulary become
    ``<unk>``. Names such as ``ptb.train.txt``, ``wiki.valid.tokens`` and ``val.txt`` will do too.

    Args:
        path: the folder.
        min_count, max_vocabulary: as in :meth:`Vocabulary.from_counts`.
        vocabulary: use this vocabulary instead of that of ``train.txt``.
        tokenizer: splits the lines; None: split at white space.

    Raises:
        ValueError: a file is missing, empty or not UTF-8, or the vocabulary has fewer than two
            words.
    """
    settings = Settings(tokenizer or WhiteSpace(), min_count, max_vocabulary, vocabulary)
    return corpus_of(folder_source(path), settings)


def load_text(
    path: str | os.PathLike[str],
    *,
    min_count: int = 2,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Any UTF-8 text file as a corpus.

    Lines are split by ``tokenizer``, or if it is None by :func:`hstree.data.tokenize` (lower-cased
    words and punctuation marks; empty lines are skipped), and end with ``<eos>``. The first 90% of
    the tokens are the training part, the next 5% the validation part and the last 5% the test part.
    Words that occur fewer than ``min_count`` times in the training part become ``<unk>``.

    Raises:
        ValueError: the file is missing, empty, too short to split, or not UTF-8, or the vocabulary
            has fewer than two words.
    """
    settings = Settings(tokenizer or Words(), min_count, max_vocabulary, vocabulary)
    return corpus_of(file_source(path), settings)


def corpus_of(source: Source, settings: Settings, folder: Path | None = None) -> Corpus:
    """The corpus of a text: from the cache, or tokenized and added to the cache.

    Args:
        source: the text.
        settings: tokenizer and limits of the vocabulary.
        folder: the cache; None: ``hstree.data.cache.user_cache``. If there is none, or it
            cannot be written, the ids are in an unnamed temporary file.

    Raises:
        ValueError: a part has no words or is too small, or the vocabulary has fewer than two words.
    """
    entry = _entry(source, settings, folder)
    return Corpus(
        source.name,
        settings.vocabulary or entry.vocabulary,
        **entry.parts,
        tokenizer=_tokenizer(settings, entry),
        lengths=entry.lengths,
    )


def held_out_of(source: Source, settings: Settings) -> HeldOut:
    """A text to score: from the cache, or tokenized and added to the cache.

    Args:
        source: the text.
        settings: tokenizer and vocabulary.

    Raises:
        ValueError: a part has no words.
    """
    entry = _entry(source, settings)
    return HeldOut(source.name, entry.parts, entry.lengths)


def _entry(source: Source, settings: Settings, folder: Path | None = None) -> cache.Entry:
    folder = folder or cache.user_cache()
    if folder is not None:
        try:
            return _cached(source, settings, folder / "tokens")
        except OSError:
            pass  # not writable, or full
    with cache.unfinished_folder(Path(tempfile.gettempdir())) as unfinished:
        return _build(source, settings, unfinished)


def _cached(source: Source, settings: Settings, folder: Path) -> cache.Entry:
    content = f"{', '.join(source.parts)}: {source.fingerprint()}"
    name = settings.key(content)
    pointer = folder / f"{name}.entry"
    if settings.vocabulary is None:
        name = cache.read_pointer(pointer)
    entry = cache.read_entry(folder / name) if name else None
    if entry is not None:
        return entry
    with cache.unfinished_folder(folder) as unfinished:
        entry = _build(source, settings, unfinished)
        name = _entry_key(content, _tokenizer(settings, entry).identity, entry.vocabulary)
        cache.publish(unfinished, folder / name, lambda place: cache.read_entry(place) is not None)
    if settings.vocabulary is None:
        cache.write_pointer(pointer, name)
    return entry


def _entry_key(content: str, tokenizer: str, vocabulary: Vocabulary) -> str:
    return cache.key(content, tokenizer, vocabulary.to_bytes())


def _tokenizer(settings: Settings, entry: cache.Entry) -> Tokenizer:
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, str):
        return Subwords.from_bytes(entry.tokenizer or b"")
    return tokenizer


def _build(source: Source, settings: Settings, folder: Path) -> cache.Entry:
    """Tokenizes a text into a folder. Only its distinct words are held in memory."""
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, str):
        size = next(iter(source.parts.values())).size  # train, or the whole text
        pieces = _followed(source.training(), "learning byte-pair encoding", size)
        tokenizer = learn_bpe(pieces, settings.max_vocabulary)
    vocabulary = settings.vocabulary
    with (folder / cache.TOKENS).open("wb+") as file:
        index, sizes, lengths = _write_ids(source, tokenizer, file)
        if vocabulary is None:
            counts = _count(file, sizes["train"], len(index)).tolist()
            found = {word: counts[number] for word, number in index.items() if counts[number]}
            try:
                vocabulary = Vocabulary.from_counts(
                    found, min_count=settings.min_count, max_size=settings.max_vocabulary
                )
            except ValueError as error:
                raise ValueError(f"{source.name}: {error}") from None
        _replace(file, np.array(vocabulary.encode(index), dtype=cache.TOKEN_TYPE))
    vocabulary.save(folder / cache.VOCABULARY)
    if isinstance(tokenizer, Subwords):
        (folder / cache.TOKENIZER).write_bytes(tokenizer.to_bytes())
    cache.seal(folder, sizes, lengths)
    entry = cache.read_entry(folder)
    if entry is None:
        raise OSError(f"{folder}: the tokenized text cannot be read back")
    return entry


def _write_ids(
    source: Source, tokenizer: Tokenizer, file: BinaryIO
) -> tuple[dict[str, int], dict[str, int], dict[str, Length]]:
    """Numbers words in order of first appearance, so that a text is tokenized only once.

    Returns:
        The number of each word, the number of tokens of each part, and its length.
    """
    index: dict[str, int] = {}
    sizes: dict[str, int] = {}
    lengths: dict[str, Length] = {}
    for name, part in source.parts.items():
        sizes[name], lengths[name] = _write_part(part, tokenizer, index, file)
    if WHOLE not in sizes:
        return index, sizes, lengths
    total = sizes[WHOLE]
    first, second = int(total * TRAIN_SHARE), int(total * (TRAIN_SHARE + VALID_SHARE))
    sizes = {"train": first, "valid": second - first, "test": total - second}
    if min(sizes.values()) < 2:
        label = source.parts[WHOLE].label.removesuffix(": the file")
        raise ValueError(
            f"{label}: {total} tokens are too few to split 90% / 5% / 5%; expected at least 40"
        )
    return index, sizes, {}


def _write_part(
    part: Part, tokenizer: Tokenizer, index: dict[str, int], file: BinaryIO
) -> tuple[int, Length]:
    """Appends the numbers of a part's words and line ends to a file; new words are added to
    ``index``. A line whose last word is ``<eos>`` gets no other. Returns how many tokens were
    written, and the length of the text."""
    size = characters = n_bytes = 0
    any_text = any_words = False
    last: str | None = None  # word of the line
    line_is_open = False
    for pieces in _batches(_followed(part.pieces(), "tokenizing", part.size)):
        any_text = True
        ids = array("i")
        for piece, words in zip(pieces, tokenizer.split_batch(pieces), strict=True):
            ids.extend([index.setdefault(word, len(index)) for word in words])
            characters += len(piece)
            n_bytes += len(piece) if piece.isascii() else len(piece.encode())
            last = words[-1] if words else last
            any_words = any_words or last is not None
            line_is_open = not piece.endswith("\n")
            if not line_is_open:
                if _needs_end(last, tokenizer):
                    ids.append(index.setdefault(END, len(index)))
                last = None
        file.write(np.array(ids, dtype=cache.TOKEN_TYPE).tobytes())
        size += len(ids)
    if line_is_open and _needs_end(last, tokenizer):
        end = index.setdefault(END, len(index))
        file.write(np.array([end], dtype=cache.TOKEN_TYPE).tobytes())
        size += 1
    if not any_words:
        raise ValueError(f"{part.label} {'has no words' if any_text else 'is empty'}")
    return size, Length(characters, n_bytes)


def _needs_end(last: str | None, tokenizer: Tokenizer) -> bool:
    """Whether ``<eos>`` follows the last word of a line, or None for a line without words."""
    return tokenizer.keeps_empty_lines if last is None else last != END


def _batches(pieces: Iterable[str]) -> Iterator[Sequence[str]]:
    """Pieces in batches large enough for a call of the tokenizer and small enough for memory."""
    batch: list[str] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _followed(pieces: Iterable[str], description: str, size: int) -> Iterator[str]:
    """The pieces of a text, with progress by their characters."""
    task = Task(description, size)
    try:
        for piece in pieces:
            yield piece
            task.advance(len(piece))
    finally:
        task.close()


def _blocks(file: BinaryIO, n_tokens: int | None = None) -> Iterator[npt.NDArray[np.int32]]:
    """The ids of a file, or the first ``n_tokens``, from its start."""
    width = cache.TOKEN_TYPE.itemsize
    left = file.seek(0, os.SEEK_END) if n_tokens is None else n_tokens * width
    file.seek(0)
    while data := file.read(min(left, _BLOCK * width)):
        left -= len(data)
        yield np.frombuffer(data, cache.TOKEN_TYPE)


def _count(file: BinaryIO, n_tokens: int, n_words: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(n_words, np.int64)
    for block in _blocks(file, n_tokens):
        counts += np.bincount(block, minlength=n_words)
    return counts


def _replace(file: BinaryIO, class_ids: npt.NDArray[np.int32]) -> None:
    """Replaces the numbers of words by class ids."""
    for block in _blocks(file):
        file.seek(-block.nbytes, os.SEEK_CUR)
        file.write(class_ids[block].tobytes())
