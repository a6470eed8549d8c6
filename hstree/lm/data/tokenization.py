"""Texts to class ids in a file: tokenized once, and kept in the cache."""

from __future__ import annotations

import os
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from hstree._progress import Task
from hstree.lm._terminal import fold

from . import cache
from .cache import Length
from .source import TRAIN_SHARE, VALID_SHARE, WHOLE, Part, Source
from .tokenizer import Subwords, Tokenizer, learn_bpe
from .vocabulary import END, Vocabulary

_BATCH_CHARACTERS = 1 << 17
_BLOCK = 1 << 18  # tokens
_EXAMPLES = 3  # of characters without a token


@dataclass(frozen=True)
class Settings:
    """How a text becomes a corpus.

    Attributes:
        tokenizer: splits the lines, or ``"bpe"``: :func:`hstree.lm.data.learn_bpe`.
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

    def splitter(self, entry: cache.Entry) -> Tokenizer:
        """The tokenizer, which may have been learned from the text of the entry."""
        if isinstance(self.tokenizer, str):
            return Subwords.from_bytes(entry.tokenizer or b"")
        return self.tokenizer


def entry_of(source: Source, settings: Settings, folder: Path | None = None) -> cache.Entry:
    """A tokenized text: from the cache, or tokenized and added to the cache.

    Args:
        source: the text.
        settings: tokenizer and limits of the vocabulary.
        folder: the cache; None: ``hstree.lm.data.cache.user_cache``. If there is none, or it
            cannot be written, the ids are in an unnamed temporary file.

    Raises:
        ValueError: a part has no words or is too small, or the vocabulary has fewer than two words.
    """
    entry = None
    folder = folder or cache.user_cache()
    if folder is not None:
        with suppress(OSError):  # not writable, or full
            entry = _cached(source, settings, folder / "tokens")
    if entry is None:
        with cache.unfinished_folder(Path(tempfile.gettempdir())) as unfinished:
            entry = _build(source, settings, unfinished)
    share, characters = entry.dropped
    if share:
        line = (
            f"hstree: {source.name}: the tokenizer has no token for {share:.2%} of the characters, "
            f"which are left out, most of all {', '.join(map(repr, characters))}; perplexities are "
            f"of the rest"
        )
        print(fold(line, sys.stderr), file=sys.stderr)
    return entry


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
        name = _entry_key(content, settings.splitter(entry).identity, entry.vocabulary)
        cache.publish(unfinished, folder / name, lambda place: cache.read_entry(place) is not None)
    if settings.vocabulary is None:
        cache.write_pointer(pointer, name)
    return entry


def _entry_key(content: str, tokenizer: str, vocabulary: Vocabulary) -> str:
    return cache.key(content, tokenizer, vocabulary.to_bytes())


def _build(source: Source, settings: Settings, folder: Path) -> cache.Entry:
    """Tokenizes a text into a folder. Only its distinct words are held in memory."""
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, str):
        size = next(iter(source.parts.values())).size()  # train, or the whole text
        pieces = _followed(source.training(), "learning byte-pair encoding", size)
        tokenizer = learn_bpe(pieces, settings.max_vocabulary)
    vocabulary = settings.vocabulary
    with (folder / cache.TOKENS).open("wb+") as file:
        index, sizes, lengths, dropped = _write_ids(source, tokenizer, file)
        if vocabulary is None:
            counts = np.zeros(len(index), np.int64)
            for block in _blocks(file, sizes["train"]):
                counts += np.bincount(block, minlength=len(index))
            found = {word: n for word, n in zip(index, counts.tolist(), strict=True) if n}
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
    cache.seal(folder, sizes, lengths, dropped)
    entry = cache.read_entry(folder)
    if entry is None:
        raise OSError(f"{folder}: the tokenized text cannot be read back")
    return entry


def _write_ids(
    source: Source, tokenizer: Tokenizer, file: BinaryIO
) -> tuple[dict[str, int], dict[str, int], dict[str, Length], tuple[float, str]]:
    """Numbers words in order of first appearance, so that a text is tokenized only once. Returns
    the number of each word, the number of tokens of each part, its length, and what the tokenizer
    left out, as :class:`cache.Entry` has it."""
    index: dict[str, int] = {}
    sizes: dict[str, int] = {}
    lengths: dict[str, Length] = {}
    lost: Counter[str] = Counter()
    for name, part in source.parts.items():
        sizes[name], lengths[name], lost_here = _write_part(part, tokenizer, index, file)
        lost += lost_here
    total = lost.total() + sum(length.characters for length in lengths.values())
    dropped = lost.total() / total, "".join(c for c, _ in lost.most_common(_EXAMPLES))
    if WHOLE not in sizes:
        return index, sizes, lengths, dropped
    total = sizes[WHOLE]
    first, second = int(total * TRAIN_SHARE), int(total * (TRAIN_SHARE + VALID_SHARE))
    sizes = {"train": first, "valid": second - first, "test": total - second}
    if min(sizes.values()) < 2:
        label = source.parts[WHOLE].label.rpartition(":")[0]
        raise ValueError(
            f"{label}: {total} tokens are too few to split 90% / 5% / 5%; expected at least 40"
        )
    return index, sizes, {}, dropped


def _write_part(
    part: Part, tokenizer: Tokenizer, index: dict[str, int], file: BinaryIO
) -> tuple[int, Length, Counter[str]]:
    """Appends the numbers of a part's words and line ends to a file; new words are added to
    ``index``. A line whose last word is ``<eos>`` gets no other. Returns how many tokens were
    written, the length of the text, and the characters that the tokenizer left out."""
    size = characters = n_bytes = 0
    lost: Counter[str] = Counter()
    any_text = any_words = False
    last: str | None = None  # word of the line
    line_is_open = False
    for pieces in _batches(_followed(part.pieces(), "tokenizing", part.size())):
        any_text = True
        ids = array("i")
        lost += tokenizer.dropped(pieces) if isinstance(tokenizer, Subwords) else Counter()
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
        known = " that the tokenizer knows" if lost else ""
        raise ValueError(f"{part.label} {f'has no words{known}' if any_text else 'is empty'}")
    characters -= lost.total()
    n_bytes -= sum(n * len(character.encode()) for character, n in lost.items())
    return size, Length(characters, n_bytes), lost


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
    task = Task(description, size)
    with closing(task):
        for piece in pieces:
            yield piece
            task.advance(len(piece))


def _blocks(file: BinaryIO, n_tokens: int | None = None) -> Iterator[npt.NDArray[np.int32]]:
    width = cache.TOKEN_TYPE.itemsize
    left = file.seek(0, os.SEEK_END) if n_tokens is None else n_tokens * width
    file.seek(0)
    while data := file.read(min(left, _BLOCK * width)):
        left -= len(data)
        yield np.frombuffer(data, cache.TOKEN_TYPE)


def _replace(file: BinaryIO, class_ids: npt.NDArray[np.int32]) -> None:
    for block in _blocks(file):
        file.seek(-block.nbytes, os.SEEK_CUR)
        file.write(class_ids[block].tobytes())
