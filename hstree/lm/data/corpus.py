"""Corpora as streams of class ids, and the loaders that make them from text files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .cache import Length
from .source import HELD_OUT, SPLITS, Source, file_source, folder_source
from .statistics import CorpusStatistics
from .tokenization import Settings, entry_of
from .tokenizer import Tokenizer, WhiteSpace, Words
from .vocabulary import Vocabulary


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

    Lines are split by ``tokenizer``, or if it is None by :func:`hstree.lm.data.tokenize` (lower-
    cased words and punctuation marks; empty lines are skipped), and end with ``<eos>``. The first
    90% of the tokens are the training part, the next 5% the validation part and the last 5% the
    test part. Words that occur fewer than ``min_count`` times in the training part become
    ``<unk>``.

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
        folder: the cache; None: ``hstree.lm.data.cache.user_cache``. If there is none, or it
            cannot be written, the ids are in an unnamed temporary file.

    Raises:
        ValueError: a part has no words or is too small, or the vocabulary has fewer than two words.
    """
    entry = entry_of(source, settings, folder)
    return Corpus(
        source.name,
        settings.vocabulary or entry.vocabulary,
        **entry.parts,
        tokenizer=settings.splitter(entry),
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
    entry = entry_of(source, settings)
    return HeldOut(source.name, entry.parts, entry.lengths)
