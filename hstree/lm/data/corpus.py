"""Corpora as streams of class ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .cache import Length
from .source import HELD_OUT, SPLITS, Source
from .statistics import CorpusStatistics
from .tokenization import Settings, entry_of
from .tokenizer import Tokenizer, WhiteSpace
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


def corpus_of(source: Source, settings: Settings, folder: Path | None = None) -> Corpus:
    entry = entry_of(source, settings, folder)
    return Corpus(
        source.name,
        settings.vocabulary or entry.vocabulary,
        **entry.parts,
        tokenizer=settings.splitter(entry),
        lengths=entry.lengths,
    )
