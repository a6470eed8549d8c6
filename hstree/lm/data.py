"""Corpora, vocabularies, tokenizers and batches."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import glob
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import textwrap
import time
import unicodedata
import warnings
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._files import write_atomic
from hstree._progress import Task, track
from hstree.lm.report import fold, optional_package, quoted
from hstree.trees import word_vectors
from hstree.trees.vectors import count_classes

__all__ = [
    "Corpus",
    "CorpusStatistics",
    "HeldOut",
    "Length",
    "Streams",
    "Subwords",
    "Tokenizer",
    "Vocabulary",
    "WhiteSpace",
    "Words",
    "detokenize",
    "embedded_corpus",
    "learn_bpe",
    "load_corpus",
    "load_held_out",
    "prompt_words",
    "sentences",
    "tokenize",
]

# Text to words and back
#
# Text to words and back.
#
# One tokenizer is used for every corpus that is not tokenized already. It has few rules, so that a
# reader can predict what a model will see: text is lower-cased and normalized (Unicode NFC), a word
# is a run of letters, digits and underscores that may be joined by inner apostrophes, hyphens and
# dots, and every other visible character is a token. What extends the character before it, such as
# an accent or a vowel sign, belongs to the token of that character. Scripts that write no spaces
# between words need another tokenizer.

RULES_VERSION = 2  # increased when :func:`tokenize` changes, so that corpora are cached again

_MODIFIERS = range(0x1F3FB, 0x1F400)  # the colors of emoji
_INNER = r".'\u00b7\u05be\u05f3\u05f4-"  # of words: also the Catalan dot, Hebrew hyphen and quotes
_SPACE = 0x200B  # a format character in name only: it ends a word


@cache
def _pattern() -> re.Pattern[str]:
    """X stands for what extends the character before it: marks, and format characters such as the
    joiners and the soft hyphen. (Word boundaries of Unicode, UAX #29, rule WB4.)"""
    extends = {"Mn", "Mc", "Me", "Cf"}
    codes = chain([0xAD], range(0x300, 0x20000), range(0xE0000, 0xE0200))  # where there are some
    found = (chr(c) for c in codes if unicodedata.category(chr(c)) in extends and c != _SPACE)
    x = "".join(chain(found, map(chr, _MODIFIERS)))
    rules = r"""
    (?: e\.g\. | i\.e\. | etc\. | vs\. | cf\. )(?![\wX])     # abbreviations keep their dots
    | <unk> | <eos>                                         # markers of a prepared corpus
    | \d+[X]* (?: [.,:] \d+[X]* )*                          # numbers, versions, times
    | [^\W\d][\wX]* (?: [INNER] [^\W_][\wX]* )* (?: \(\) )?  # words, dotted names, calls like f()
    | \.\.\. | --+
    | \S[X]* (?: (?<=\u200d) \S[X]* )*                      # a joiner joins emoji
    """
    return re.compile(rules.replace("INNER", _INNER).replace("X", x), re.VERBOSE)


_STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
    | dict.fromkeys("\u2010\u2011\u2013\u2014", "-")
)
_SENTENCE_END = frozenset({".", "?", "!"})
_CLOSING = frozenset({")", "]", '"', "'"})
_ABROAD = "\u0964\u0965\u060c\u061b\u061f"  # dandas; comma, semicolon, question mark of Arabic
_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%" + _ABROAD) | {"...", "n't"}
_NO_SPACE_AFTER = frozenset("([{$#@")


def tokenize(text: str) -> list[str]:
    """Lower-cased, normalized words and punctuation marks of ``text``, in order.

    Example:
        >>> from hstree.lm.data import tokenize
        >>> tokenize("Don't call os.path.join() twice (see 3.11).")
        ["don't", 'call', 'os.path.join()', 'twice', '(', 'see', '3.11', ')', '.']
    """
    text = unicodedata.normalize("NFC", text.translate(_STRAIGHT).lower())
    return _pattern().findall(text)


def sentences(tokens: Iterable[str]) -> Iterator[list[str]]:
    """Split a token stream after full stops, question marks and exclamation marks (and the quotes
    that close them).

    Example:
        >>> from hstree.lm.data import sentences, tokenize
        >>> [len(s) for s in sentences(tokenize("It works. Does it? Yes"))]
        [3, 3, 1]
    """
    current: list[str] = []
    ended = False
    for token in tokens:
        if ended and token not in _CLOSING:
            yield current
            current = []
        ended = token in _SENTENCE_END or (ended and token in _CLOSING)
        current.append(token)
    if current:
        yield current


def detokenize(words: Iterable[str], end_of_sentence: str = "<eos>") -> str:
    """Readable text from tokens: no space before closing marks or after opening ones, a new line at
    each sentence end.

    Handles the conventions of :func:`tokenize` and of the Penn Treebank (``do n't``, ``company
    's``).

    Example:
        >>> from hstree.lm.data import detokenize
        >>> detokenize(["it", "does", "n't", "(", "yet", ")", "work", ".", "<eos>", "why", "?"])
        "it doesn't (yet) work.\\nwhy?"
    """
    pieces: list[str] = []
    glue = True
    quote_open = False
    for word in words:
        if word == end_of_sentence:
            pieces.append("\n")
            glue, quote_open = True, False
            continue
        closes = word in _NO_SPACE_BEFORE or (
            len(word) > 1 and word[0] == "'" and word[1:].isalpha()
        )
        if word == '"':
            closes, quote_open = quote_open, not quote_open
        if not glue and not closes:
            pieces.append(" ")
        pieces.append(word)
        glue = word in _NO_SPACE_AFTER or (word == '"' and quote_open)
    return "".join(pieces).strip("\n")


# Vocabularies
#
# The words of a corpus and their class ids.

UNKNOWN = "<unk>"
END = "<eos>"

DIGITS = 18
"""Of a frequency in a file: fewer than an int64 may have."""


class Vocabulary:
    """V words, numbered from 0, with the number of times each occurs in the training text.

    Classes are sorted by decreasing frequency (ties in alphabetical order), as
    :class:`torch.nn.AdaptiveLogSoftmaxWithLoss` requires. Every vocabulary contains ``<unk>`` and
    ``<eos>``, with frequency 0 if the text has none.

    Args:
        words: the V words by class id; distinct, without white space.
        frequencies: V non-negative counts.

    Raises:
        ValueError: a word that is empty, has white space or occurs twice; a negative or missing
            count; ``<unk>`` or ``<eos>`` missing.
    """

    def __init__(
        self, words: Sequence[str], frequencies: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        self.words: tuple[str, ...] = tuple(words)
        self.frequencies: npt.NDArray[np.int64] = np.asarray(frequencies, dtype=np.int64).reshape(
            -1
        )
        if len(self.words) != len(self.frequencies):
            raise ValueError(
                f"frequencies: expected one count for each of {len(self.words)} words, "
                f"got {len(self.frequencies)}"
            )
        self._index: dict[str, int] = {}
        for position, word in enumerate(self.words):
            if not word or word.split() != [word]:
                raise ValueError(
                    f"words[{position}]: expected a word without white space, got {quoted(word)}"
                )
            if word in self._index:
                raise ValueError(
                    f"words[{position}]: {quoted(word)} is already words[{self._index[word]}]"
                )
            self._index[word] = position
        for marker in (UNKNOWN, END):
            if marker not in self._index:
                raise ValueError(f"words: the marker {marker} is missing")
        if len(self.frequencies) and int(self.frequencies.min()) < 0:
            position = int(self.frequencies.argmin())
            raise ValueError(
                f"frequencies[{position}]: expected at least 0, got {self.frequencies[position]}"
            )

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, min_count: int = 1, max_size: int | None = None
    ) -> Vocabulary:
        """The vocabulary of a text with the given word counts.

        Words that occur fewer than ``min_count`` times, and the rarest beyond ``max_size`` (which
        counts ``<unk>`` and ``<eos>``), are left out; their occurrences count as ``<unk>``.

        Raises:
            ValueError: ``min_count`` < 1 or ``max_size`` < 4, or fewer than two words remain in
                addition to the markers.
        """
        if min_count < 1:
            raise ValueError(f"min_count: expected at least 1, got {min_count}")
        if max_size is not None and max_size < 4:
            raise ValueError(
                f"max_size: expected at least 4 (<unk>, <eos> and two words), got {max_size}"
            )
        kept = [
            word
            for word, count in counts.items()
            if count >= min_count and word not in (UNKNOWN, END)
        ]
        kept.sort(key=lambda word: (-counts[word], word))
        if max_size is not None:
            kept = kept[: max_size - 2]
        if len(kept) < 2:
            rule = "" if min_count == 1 else f" that occur at least {min_count} times"
            found = f"only {quoted(kept[0])}" if kept else "none"
            raise ValueError(
                f"the vocabulary needs at least two different words{rule}, "
                f"the training text has {found}"
            )
        total = sum(counts.values())
        end = counts.get(END, 0)
        frequency = {word: counts[word] for word in kept}
        frequency[UNKNOWN] = total - end - sum(frequency.values())
        frequency[END] = end
        words = sorted(frequency, key=lambda word: (-frequency[word], word))
        return cls(words, [frequency[word] for word in words])

    @property
    def unknown(self) -> int:
        """Class id of ``<unk>``."""
        return self._index[UNKNOWN]

    @property
    def end(self) -> int:
        """Class id of ``<eos>``."""
        return self._index[END]

    def encode(self, words: Iterable[str]) -> list[int]:
        """Class ids of words; a word that is not in the vocabulary becomes ``<unk>``."""
        unknown = self.unknown
        index = self._index
        return [index.get(word, unknown) for word in words]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Words of class ids. Raises ValueError for an id outside [0, V)."""
        result = []
        for class_id in ids:
            if not 0 <= class_id < len(self.words):
                raise ValueError(
                    f"ids: expected class ids in [0, {len(self.words)}), got {class_id}"
                )
            result.append(self.words[class_id])
        return result

    def to_bytes(self) -> bytes:
        """One line ``word<TAB>frequency`` for each class, in order of class id, as UTF-8."""
        lines = [
            f"{word}\t{count}\n"
            for word, count in zip(self.words, self.frequencies.tolist(), strict=True)
        ]
        return "".join(lines).encode()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_bytes` to a file."""
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what :meth:`save` wrote. Raises ValueError that names the file and line where it is
        not that."""
        data = Path(path).read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not a vocabulary file: byte {error.start} is not UTF-8"
            ) from None
        if not text.endswith("\n"):
            raise ValueError(
                f"{path}: not a vocabulary file, or a truncated one: the last line does not end"
            )
        words, counts = [], []
        for number, line in enumerate(text[:-1].split("\n"), start=1):
            word, tab, count = line.partition("\t")
            if not tab or not count.isdecimal():
                raise ValueError(
                    f"{path}, line {number}: expected word<TAB>frequency, got {line[:60]!r}"
                )
            if len(count) > DIGITS:
                raise ValueError(
                    f"{path}, line {number}: expected a frequency of at most {DIGITS} digits, got "
                    f"{len(count)}"
                )
            words.append(word)
            counts.append(int(count))
        try:
            return cls(words, counts)
        except ValueError as error:
            raise ValueError(f"{path}: not a vocabulary file: {error}") from None

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._index

    def __getitem__(self, word: str) -> int:
        """Class id of a word of the vocabulary. Raises KeyError for any other."""
        return self._index[word]

    def __iter__(self) -> Iterator[str]:
        return iter(self.words)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Vocabulary):
            return NotImplemented
        return self.words == other.words and bool(
            np.array_equal(self.frequencies, other.frequencies)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Vocabulary({len(self.words):,} words, {int(self.frequencies.sum()):,} occurrences)"


# Tokenizers
#
# Tokenizers: lines of text to tokens, and tokens back to text.

BPE = "bpe"
_FLAG = "--tokenizer"
_BYTES = 256


class Tokenizer(Protocol):
    """The interface of tokenizers. Tokens are not empty and have no white space; line ends are not
    tokens."""

    @property
    def identity(self) -> str:
        """A string that is equal for tokenizers that split in the same way, in every process."""

    @property
    def keeps_empty_lines(self) -> bool:
        """Whether a line without tokens is a line of the corpus, with an ``<eos>`` of its own."""

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Tokens of each line, without its line end."""

    def split(self, line: str) -> list[str]:
        """Tokens of one line."""
        return self.split_batch([line])[0]

    def join(self, tokens: Iterable[str]) -> str:
        """Readable text, by default that of :func:`hstree.lm.data.detokenize`; each ``<eos>`` ends
        a line."""
        return detokenize(tokens)


class WhiteSpace(Tokenizer):
    """Splits at white space, for texts that are tokenized already."""

    identity = "white space 1"
    keeps_empty_lines = True

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Words of each line."""
        return [line.split() for line in lines]


class Words(Tokenizer):
    """Lower-cased words and punctuation marks: :func:`hstree.lm.data.tokenize` and
    :func:`hstree.lm.data.detokenize`. Empty lines are skipped."""

    identity = f"words {RULES_VERSION}, Unicode {unicodedata.unidata_version}"
    keeps_empty_lines = False

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Tokens of each line."""
        return [tokenize(line) for line in lines]


class Subwords(Tokenizer):
    """A tokenizer of the package ``tokenizers``.

    A token is named by its string in the vocabulary of the tokenizer, or ``<token:ID>`` if that
    string is empty or has white space. No special tokens are added, nothing is truncated or padded.
    Empty lines are kept.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``.

    Raises:
        ValueError: the package is missing, or two tokens have the same name.
    """

    keeps_empty_lines = True

    def __init__(self, tokenizer: Any) -> None:
        self._setup(tokenizer.to_str().encode())

    def _setup(self, data: bytes) -> None:
        tokenizers = optional_package("tokenizers", _FLAG, "data")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"not a tokenizer of the package tokenizers (tokenizer.json): {error}"
            ) from None
        self._data = data
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._words = {number: _token_name(token, number) for token, number in vocabulary.items()}
        self._ids = {word: number for number, word in self._words.items()}
        self._dropped: dict[str, bool] = {}
        if len(self._ids) != len(self._words):
            raise ValueError("not a usable tokenizer: two of its tokens have the same name")

    def to_bytes(self) -> bytes:
        """The tokenizer as JSON, the ``tokenizer.json`` of the package ``tokenizers``."""
        return self._data

    @classmethod
    def from_bytes(cls, data: bytes) -> Subwords:
        """The tokenizer of a ``tokenizer.json``. Raises ValueError if the data are not valid or the
        package is missing."""
        subwords = cls.__new__(cls)
        subwords._setup(data)
        return subwords

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Subwords:
        """The tokenizer in a file. Raises ValueError that names the file if it is not
        valid."""
        file = Path(path)
        if not os.path.isfile(file):  # whatever the name
            raise ValueError(f"{_FLAG}: {file}: no such file")
        try:
            return cls.from_bytes(file.read_bytes())
        except ValueError as error:
            message = str(error).removeprefix(f"{_FLAG}: ")
            raise ValueError(f"{_FLAG}: {file}: {message}") from None

    @property
    def identity(self) -> str:
        """Contains the SHA-256 of the JSON."""
        return f"subwords {hashlib.sha256(self._data).hexdigest()}"

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Tokens of each line; lines are spread over the threads of the package."""
        bare = [_without_end(line) for line in lines]
        words = self._words
        try:
            encodings = self._tokenizer.encode_batch_fast(bare, add_special_tokens=False)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{_FLAG}: the tokenizer cannot split the text: {error}") from None
        return [[words[number] for number in encoding.ids] for encoding in encodings]

    def join(self, tokens: Iterable[str]) -> str:
        """Text by the decoder of the tokenizer. ``<eos>`` becomes a line end; a token that the
        tokenizer does not have, such as ``<unk>``, is not changed."""
        pieces: list[str] = []
        run: list[int] = []
        for token in tokens:
            if token in self._ids and token != END:
                run.append(self._ids[token])
                continue
            pieces += [self._decode(run), "\n" if token == END else token]
            run = []
        return "".join([*pieces, self._decode(run)])

    def dropped(self, lines: Iterable[str]) -> Counter[str]:
        """How often each character occurs for which there is no token, white space aside. Such
        characters are left out of the text."""
        counts = Counter(chain.from_iterable(lines))
        return Counter({c: n for c, n in counts.items() if not c.isspace() and self._drops(c)})

    def _drops(self, character: str) -> bool:
        if character not in self._dropped:
            text = self.join(self.split(character))
            damaged = "\ufffd" in text and character != "\ufffd"  # one of its bytes has no token
            self._dropped[character] = damaged or not text.strip()
        return self._dropped[character]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
        return text


_NAMED: dict[str, type[WhiteSpace | Words]] = {"white space": WhiteSpace, "words": Words}
_KEY = "hstree"


def tokenizer_to_bytes(tokenizer: Tokenizer) -> bytes:
    """What :func:`tokenizer_from_bytes` reads: the JSON of a :class:`Subwords`, or the name of one
    of the others. Raises TypeError for a tokenizer of another class."""
    if isinstance(tokenizer, Subwords):
        return tokenizer.to_bytes()
    for name, kind in _NAMED.items():
        if type(tokenizer) is kind:
            return json.dumps({_KEY: name}).encode()
    raise TypeError(f"tokenizer: expected one of hstree.lm.data, got {type(tokenizer).__name__}")


def tokenizer_from_bytes(data: bytes) -> Tokenizer:
    """The tokenizer that :func:`tokenizer_to_bytes` wrote. Raises ValueError for anything else."""
    for kind in _NAMED.values():
        if data == tokenizer_to_bytes(kind()):
            return kind()
    return Subwords.from_bytes(data)


def learn_bpe(lines: Iterable[str], max_vocabulary: int | None) -> Subwords:
    """Byte-level byte-pair encoding, learned from the lines of a text.

    Merges are learned until the 256 bytes and the merges are ``max_vocabulary - 2`` tokens, or no
    pair occurs twice. The encoding is lossless: ``join(split(line)) == line`` for every line.

    Args:
        lines: read once; only the distinct words are held in memory.
        max_vocabulary: largest number of classes, ``<unk>`` and ``<eos>`` included.

    Raises:
        ValueError: ``max_vocabulary`` is missing or too small, or the package is missing.
    """
    n_tokens = check_bpe_size(max_vocabulary) - 2
    tokenizers = optional_package("tokenizers", _FLAG, "data")
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=n_tokens,
        min_frequency=2,
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(_without_end, lines), trainer)
    return Subwords(tokenizer)


def check_bpe_size(max_vocabulary: int | None) -> int:
    """The size, if it is valid for byte-pair encoding; else raises ValueError."""
    if max_vocabulary is None:
        raise ValueError(
            f"--max-vocabulary: {_FLAG} {BPE} needs the number of classes to learn, such as 8000"
        )
    if max_vocabulary < _BYTES + 2:
        raise ValueError(
            f"--max-vocabulary: expected at least {_BYTES + 2} with {_FLAG} {BPE} "
            f"(256 bytes, {UNKNOWN}, {END}), got {max_vocabulary}"
        )
    return max_vocabulary


def _without_end(line: str) -> str:
    return line[:-1].removesuffix("\r") if line.endswith("\n") else line


def _token_name(token: str, number: int) -> str:
    return token if token.split() == [token] else f"<token:{number}>"


def prompt_words(
    prompt: str, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Words of a prompt. With subwords: their tokens, with ``<eos>`` for line ends. Without: pieces
    between white space that are in the vocabulary, and other pieces tokenized as text files are."""
    if isinstance(tokenizer, Subwords):
        end = vocabulary.words[vocabulary.end]
        first, *others = tokenizer.split_batch(prompt.split("\n"))
        return [*first, *(token for line in others for token in (end, *line))]
    words: list[str] = []
    for piece in prompt.split():
        words.extend([piece] if piece in vocabulary else tokenize(piece))
    return words


# Texts before tokenization
#
# Texts before tokenization: their location and how their lines are read.

SPLITS = ("train", "valid", "test")
HELD_OUT = ("valid", "test")
WHOLE, TEXT = "whole", "text"
_SPLIT_NAMES = {"train": "train", "valid": "valid|val|validation", "test": "test"}
_ENDS = "txt|tokens|raw"
TRAIN_SHARE, VALID_SHARE = 0.90, 0.05
_PIECE_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"

Pieces: TypeAlias = Callable[[], Iterator[str]]


@dataclass(frozen=True)
class Part:
    """One part of a text: its name in error messages, its text in pieces of at most one line, of
    which one that does not end in a newline continues in the next, and a function that returns
    about the number of its characters."""

    label: str
    pieces: Pieces
    size: Callable[[], int]


@dataclass(frozen=True)
class Source:
    """A text that can be read several times and is never held in memory as a whole.

    Attributes:
        name: a name for people.
        parts: train, valid and test, or one ``WHOLE`` that is split after tokenization. Of a text
            that is only to be scored: valid and test, or one of them, or one ``TEXT``, which is
            not split.
        training: pieces of the text from which a tokenizer may be learned.
        fingerprint: a function that returns a string that identifies the content.
    """

    name: str
    parts: Mapping[str, Part]
    training: Pieces
    fingerprint: Callable[[], str]


def folder_source(path: str | os.PathLike[str], *, held_out: bool = False) -> Source:
    """A text in the files of a folder, ``train.txt``, ``valid.txt`` and ``test.txt`` or names such
    as ``ptb.train.txt``, ``wiki.valid.tokens``, ``val.txt`` and ``test.raw``. ``held_out``: only
    the last two, of which one suffices. Raises ValueError, which lists them, if a file is missing
    or several could be meant."""
    folder = Path(path)
    found = {split: _split_file(folder, split) for split in (HELD_OUT if held_out else SPLITS)}
    files = {split: file for split, file in found.items() if file is not None}
    if not files or (len(files) < len(found) and not held_out):
        expected = " or ".join if held_out else ", ".join
        missing = [f"{split}.txt" for split in found if split not in files]
        raise ValueError(
            f"{folder}: expected {expected(f'{split}.txt' for split in found)} in this folder, "
            f"missing {', '.join(missing)}"
        )
    parts = {
        split: Part(f"{file}: the file", partial(read_pieces, file), partial(os.path.getsize, file))
        for split, file in files.items()
    }
    return Source(
        folder.resolve().name,
        parts,
        next(iter(parts.values())).pieces,
        partial(hash_files, list(files.values())),
    )


def _split_file(folder: Path, split: str) -> Path | None:
    usual = folder / f"{split}.txt"
    if usual.is_file():
        return usual
    others = _named(folder, _SPLIT_NAMES[split])
    if len(others) > 1:
        raise ValueError(
            f"{folder}: expected one file for the part {split}, got "
            f"{', '.join(sorted(file.name for file in others))}; name one of them {usual.name}"
        )
    return others[0] if others else None


def has_texts(folder: Path) -> bool:
    """Whether a folder has any of the files of :func:`folder_source`."""
    return bool(_named(folder, "|".join(_SPLIT_NAMES.values())))


def _named(folder: Path, splits: str) -> list[Path]:
    pattern = re.compile(rf"([^.]+\.)?({splits})\.({_ENDS})")
    return [file for file in folder.iterdir() if pattern.fullmatch(file.name) and file.is_file()]


def file_source(path: str | os.PathLike[str], *, held_out: bool = False) -> Source:
    """One text file, or what comes through a pipe, which is copied to a temporary file; a tokenizer
    may be learned from the first 90% of its bytes. ``held_out``: all of it is to be scored, so that
    it is not split. Raises ValueError if it is neither."""
    place = file = Path(path)
    copy = tempfile.TemporaryFile() if place.is_fifo() else None  # noqa: SIM115
    if copy is not None:
        with place.open("rb") as pipe:
            shutil.copyfileobj(pipe, copy)
        copy.flush()
        file = Path(f"/dev/fd/{copy.fileno()}")
    elif not place.is_file():
        raise ValueError(f"{place}: expected a file, a folder or a pipe")
    size = partial(os.path.getsize, file)
    read = partial(read_pieces, file, name=place)
    part = Part(f"{place}: the file", read, size)
    training = partial(read, int(size() * TRAIN_SHARE))
    name = TEXT if held_out else WHOLE
    source = Source(place.name, {name: part}, training, partial(hash_files, [file]))
    if copy is not None:
        weakref.finalize(source, copy.close)
    return source


def hash_files(files: Iterable[Path]) -> str:
    whole = hashlib.sha256()
    for file in files:
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_PIECE_BYTES):
                digest.update(block)
        whole.update(digest.digest())
    return whole.hexdigest()


def read_pieces(path: Path, stop: int | None = None, *, name: Path | None = None) -> Iterator[str]:
    """Lines of a UTF-8 file, each with its line end; a byte order mark is skipped. A line of more
    than 256 KiB is split into pieces, at white space if there is any. No piece begins at or after
    the byte ``stop``. Raises ValueError, which names the file, or ``name``, and the first byte that
    is not UTF-8."""
    with path.open("rb") as file:
        offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(offset)
        number = 1
        while (stop is None or offset < stop) and (raw := _read_piece(file)):
            try:
                yield raw.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{name or path}: not UTF-8 text: byte 0x{raw[error.start]:02x} at offset "
                    f"{offset + error.start} (line {number})"
                ) from None
            offset += len(raw)
            number += raw.endswith(b"\n")


def _read_piece(file: BinaryIO) -> bytes:
    """The next line, or its next piece if it is too long."""
    raw = file.readline(_PIECE_BYTES)
    if raw.endswith(b"\n") or len(raw) < _PIECE_BYTES:
        return raw
    cut = max(raw.rfind(b" "), raw.rfind(b"\t"))
    if cut <= 0:
        cut = len(raw) - 1
        while cut > len(raw) - 4 and raw[cut] & 0xC0 == 0x80:  # within a character
            cut -= 1
    file.seek(cut - len(raw), os.SEEK_CUR)
    return raw[:cut]


# Tokenized texts on disk
#
# Tokenized texts on disk, keyed by content.
#
# An entry is a folder that is written under a temporary name and then renamed:
#
#     tokens.bin        class ids, int32 little-endian: train, valid, test
#     vocabulary.txt    as Vocabulary.save
#     tokenizer.json    of Subwords only
#     entry.json        format version, number of tokens, characters and bytes of each part, what
#                       the tokenizer left out, CRC-32 of the other files and of itself
#
# Its name is a SHA-256 of the content of the text, the tokenizer and the vocabulary. If the
# vocabulary is made from the text, a small file whose name is a SHA-256 of content and settings
# holds the name of the entry.

CACHE_VERSION = 3
TOKENS, VOCABULARY = "tokens.bin", "vocabulary.txt"
TOKENIZER, HEADER = "tokenizer.json", "entry.json"
TOKEN_TYPE = np.dtype("<i4")
_UNFINISHED = ".hstree-writing-"
_ABANDONED_AFTER = 24 * 3600.0  # seconds without a write
_READ_BYTES = 1 << 20


class Length(NamedTuple):
    """The length of a text before tokenization, line ends included, without the characters for
    which a tokenizer has no token.

    Attributes:
        characters: number of characters.
        bytes: number of bytes in UTF-8.

    Example:
        >>> from hstree.lm.data import Length
        >>> Length(characters=3, bytes=5).bytes
        5
    """

    characters: int
    bytes: int


@dataclass(frozen=True)
class Entry:
    """A tokenized text: read-only memory maps of the class ids of each part, the words of the
    classes, the tokenizer as JSON (of Subwords only), the length of each part (none if it was cut
    out of one file), and what the tokenizer left out: the share of the characters, and the most
    frequent of them."""

    parts: Mapping[str, npt.NDArray[np.int32]]
    vocabulary: Vocabulary
    tokenizer: bytes | None
    lengths: Mapping[str, Length]
    dropped: tuple[float, str]


def user_cache() -> Path | None:
    """The folder named by the environment variable ``HSTREE_CACHE``, or None if the variable is
    empty. If it is not set: ``$XDG_CACHE_HOME/hstree`` or ``~/.cache/hstree``."""
    named = os.environ.get("HSTREE_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "hstree")
    try:
        return Path.home() / ".cache" / "hstree"
    except RuntimeError:  # no home
        return None


def cache_key(*parts: str | bytes | int | None) -> str:
    digest = hashlib.sha256(f"hstree tokens {CACHE_VERSION}".encode())
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()


def read_entry(folder: Path) -> Entry | None:
    """The entry in a folder, or None if there is none or it is damaged."""
    try:
        header = json.loads((folder / HEADER).read_bytes())
        if header.pop("check") != _check(header):
            return None
        sizes, checks = header["tokens"], header["crc32"]
        lengths = {part: Length(*length) for part, length in header["lengths"].items()}
        dropped = float(header["dropped"][0]), str(header["dropped"][1])
        if header["version"] != CACHE_VERSION or {TOKENS, VOCABULARY} - checks.keys():
            return None
        if (folder / TOKENS).stat().st_size != sum(sizes.values()) * TOKEN_TYPE.itemsize:
            return None
        if any(_crc32(folder / name) != check for name, check in checks.items()):
            return None
        vocabulary = Vocabulary.load(folder / VOCABULARY)
        tokenizer = (folder / TOKENIZER).read_bytes() if TOKENIZER in checks else None
        tokens = np.memmap(folder / TOKENS, TOKEN_TYPE, mode="r")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    cuts = np.cumsum(list(sizes.values()))[:-1].tolist()
    parts = dict(zip(sizes, np.split(tokens, cuts), strict=True))
    return Entry(parts, vocabulary, tokenizer, lengths, dropped)


def seal(
    folder: Path,
    sizes: Mapping[str, int],
    lengths: Mapping[str, Length],
    dropped: tuple[float, str],
) -> None:
    """Write the header of an entry whose other files are complete: tokens of each part, characters
    and bytes of those for which they are known, and what the tokenizer left out."""
    names = [name for name in (TOKENS, VOCABULARY, TOKENIZER) if (folder / name).is_file()]
    header: dict[str, Any] = {
        "version": CACHE_VERSION,
        "tokens": dict(sizes),
        "lengths": dict(lengths),
        "dropped": dropped,
        "crc32": {name: _crc32(folder / name) for name in names},
    }
    header["check"] = _check(header)
    (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n")


@contextlib.contextmanager
def unfinished_folder(parent: Path) -> Iterator[Path]:
    """A new folder in ``parent`` to write an entry into; removed at the end unless it has been
    renamed."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish_entry(folder: Path, place: Path, is_sound: Callable[[Path], bool]) -> None:
    """Rename a finished folder to ``place``. If another process has put a folder there, that one is
    kept if it is sound, else replaced. Never fails: a folder that cannot be renamed is not
    cached."""
    with contextlib.suppress(OSError):
        os.chmod(folder, 0o755)
        try:
            os.replace(folder, place)
        except OSError:
            if is_sound(place):
                return
            damaged = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=place.parent))
            try:
                os.replace(place, damaged / "entry")
                os.replace(folder, place)
            finally:
                shutil.rmtree(damaged, ignore_errors=True)


def read_pointer(file: Path) -> str:
    """The name that a pointer file holds; empty if there is none."""
    try:
        name = file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if len(name) == 64 and name.isalnum() else ""


def write_pointer(file: Path, name: str) -> None:
    """Write a pointer file atomically. Never fails."""
    with contextlib.suppress(OSError):
        write_atomic(file, name.encode())


def _remove_abandoned(parent: Path) -> None:
    for path in (*parent.glob(f"{_UNFINISHED}*"), *parent.glob(".*.part")):
        with contextlib.suppress(OSError):
            files = list(path.iterdir()) if path.is_dir() else [path]
            last_write = max(file.stat().st_mtime for file in [path, *files])
            if time.time() - last_write > _ABANDONED_AFTER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _check(header: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    check = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            check = zlib.crc32(block, check)
    return check


# Tokenization
#
# Texts to class ids in a file: tokenized once, and kept in the cache.

_BATCH_CHARACTERS = 1 << 17
_BLOCK_TOKENS = 1 << 18  # tokens
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
        return cache_key(content, tokenizer, self.min_count, self.max_vocabulary)

    def splitter(self, entry: Entry) -> Tokenizer:
        """The tokenizer, which may have been learned from the text of the entry."""
        if isinstance(self.tokenizer, str):
            return Subwords.from_bytes(entry.tokenizer or b"")
        return self.tokenizer


def entry_of(source: Source, settings: Settings, folder: Path | None = None) -> Entry:
    """A tokenized text: from the cache, or tokenized and added to the cache.

    Args:
        source: the text.
        settings: tokenizer and limits of the vocabulary.
        folder: the cache; None: ``hstree.lm.data.user_cache``. If there is none, or it
            cannot be written, the ids are in an unnamed temporary file.

    Raises:
        ValueError: a part has no words or is too small, or the vocabulary has fewer than two words.
    """
    entry = None
    folder = folder or user_cache()
    if folder is not None:
        with suppress(OSError):  # not writable, or full
            entry = _cached(source, settings, folder / "tokens")
    if entry is None:
        with unfinished_folder(Path(tempfile.gettempdir())) as unfinished:
            entry = _tokenize_into(source, settings, unfinished)
    share, characters = entry.dropped
    if share:
        line = (
            f"hstree: {source.name}: the tokenizer has no token for {share:.2%} of the characters, "
            f"which are left out, most of all {', '.join(map(repr, characters))}; perplexities are "
            f"of the rest"
        )
        print(fold(line, sys.stderr), file=sys.stderr)
    return entry


def _cached(source: Source, settings: Settings, folder: Path) -> Entry:
    content = f"{', '.join(source.parts)}: {source.fingerprint()}"
    name = settings.key(content)
    pointer = folder / f"{name}.entry"
    if settings.vocabulary is None:
        name = read_pointer(pointer)
    entry = read_entry(folder / name) if name else None
    if entry is not None:
        return entry
    with unfinished_folder(folder) as unfinished:
        entry = _tokenize_into(source, settings, unfinished)
        name = _entry_key(content, settings.splitter(entry).identity, entry.vocabulary)
        publish_entry(unfinished, folder / name, lambda place: read_entry(place) is not None)
    if settings.vocabulary is None:
        write_pointer(pointer, name)
    return entry


def _entry_key(content: str, tokenizer: str, vocabulary: Vocabulary) -> str:
    return cache_key(content, tokenizer, vocabulary.to_bytes())


def _tokenize_into(source: Source, settings: Settings, folder: Path) -> Entry:
    """Tokenizes a text into a folder. Only its distinct words are held in memory."""
    tokenizer = settings.tokenizer
    if isinstance(tokenizer, str):
        size = next(iter(source.parts.values())).size()  # train, or the whole text
        pieces = _followed(source.training(), "learning byte-pair encoding", size)
        tokenizer = learn_bpe(pieces, settings.max_vocabulary)
    vocabulary = settings.vocabulary
    with (folder / TOKENS).open("wb+") as file:
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
        _replace(file, np.array(vocabulary.encode(index), dtype=TOKEN_TYPE))
    vocabulary.save(folder / VOCABULARY)
    if isinstance(tokenizer, Subwords):
        (folder / TOKENIZER).write_bytes(tokenizer.to_bytes())
    seal(folder, sizes, lengths, dropped)
    entry = read_entry(folder)
    if entry is None:
        raise OSError(f"{folder}: the tokenized text cannot be read back")
    return entry


def _write_ids(
    source: Source, tokenizer: Tokenizer, file: BinaryIO
) -> tuple[dict[str, int], dict[str, int], dict[str, Length], tuple[float, str]]:
    """Numbers words in order of first appearance, so that a text is tokenized only once. Returns
    the number of each word, the number of tokens of each part, its length, and what the tokenizer
    left out, as :class:`Entry` has it."""
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
        file.write(np.array(ids, dtype=TOKEN_TYPE).tobytes())
        size += len(ids)
    if line_is_open and _needs_end(last, tokenizer):
        end = index.setdefault(END, len(index))
        file.write(np.array([end], dtype=TOKEN_TYPE).tobytes())
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
    width = TOKEN_TYPE.itemsize
    left = file.seek(0, os.SEEK_END) if n_tokens is None else n_tokens * width
    file.seek(0)
    while data := file.read(min(left, _BLOCK_TOKENS * width)):
        left -= len(data)
        yield np.frombuffer(data, TOKEN_TYPE)


def _replace(file: BinaryIO, class_ids: npt.NDArray[np.int32]) -> None:
    for block in _blocks(file):
        file.seek(-block.nbytes, os.SEEK_CUR)
        file.write(class_ids[block].tobytes())


# Statistics
#
# Statistics of a corpus for the construction of heads: class frequencies and word vectors.


@dataclass(frozen=True)
class CorpusStatistics:
    """Counts of a training text of V classes.

    Attributes:
        frequencies: int64 [V], occurrences of each class in the training text.
        tokens: int32 [n], class ids of the training text in order.
    """

    frequencies: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]

    @classmethod
    def from_tokens(cls, tokens: npt.ArrayLike, n_classes: int) -> CorpusStatistics:
        """Count the classes of a token stream. Raises TypeError for tokens that are not integers,
        ValueError for an id outside [0, n_classes)."""
        counts = count_classes(tokens, n_classes)
        return cls(counts, np.ascontiguousarray(np.asarray(tokens).reshape(-1), dtype=np.int32))

    def vectors(self, **options: Any) -> npt.NDArray[np.float32]:
        """Word vectors float32 [V, F] derived from ``tokens``: PPMI of neighbouring words and a
        truncated SVD. Options are those of :func:`hstree.trees.word_vectors`."""
        return word_vectors(self.tokens, len(self.frequencies), **options)

    def unigram_loss(self, tokens: npt.NDArray[np.integer[Any]]) -> float:
        """Mean negative log-probability (nats per token) of ``tokens`` under the unigram
        distribution of this corpus.

        A class that does not occur in the training text is given half the count of the rarest class
        that does.
        """
        mass = self.frequencies.astype(np.float64)
        mass[mass == 0] = mass[mass > 0].min() / 2
        log_prob = np.log(mass / mass.sum())
        counts = count_classes(tokens, len(mass))
        return float(-(counts @ log_prob) / counts.sum())


# Corpora
#
# Corpora as streams of class ids.


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


# The embedded corpus
#
# The embedded corpus: English prose from the Python installation.
#
# The docstrings of the standard library and the help topics of :mod:`pydoc` are about 400,000
# tokens of technical English that need no download. Modules are parsed, never imported, so none
# of their code runs.

_EMBEDDED_VERSION = 1
VOCABULARY_SIZE = 10_000
_HELD_OUT_PERCENT = 5
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_EXAMPLE = (">>>", "...", "$ ")
_CODE_MARKS = re.compile(r"[^\w\s.,;:!?'\"()-]")
_ROLE = re.compile(
    r":[a-z]+(?::[a-z]+)?:(?=`)|:(?=(?:param|type|return|returns|rtype|raise|raises)\b[^:]*:)"
)
_QUOTE = re.compile(r"(?<!\w)['\u2018\u2019]+|['\u2019]+(?!\w)|[\"\u201c\u201d`*|]")


def embedded_corpus(
    *,
    min_count: int = 1,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    library: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Corpus:
    """The docstrings and help topics of this Python installation as a corpus of 8,000 to 10,000
    types.

    Paragraphs of prose are kept, code and tables are dropped. The rest is tokenized by
    :func:`hstree.lm.data.tokenize`, one sentence a line. Whole modules and topics are assigned to
    the training (90%), validation and test part (5% each) by a hash of their names, so no module
    is in two parts; repeated paragraphs are dropped. Words outside the 10,000 most
    frequent of the training part, and words that occur only once in it, become ``<unk>``. The
    result is the same for the same installation.

    The ids are kept in the cache of the user, so that only the first call takes
    seconds. A cache that cannot be written is ignored.

    Args:
        min_count, max_vocabulary, vocabulary: as in :func:`hstree.lm.data.load_corpus`.
        library: folder of the modules; None: the standard library of the running Python.
        cache: folder of the cache; None: that of the user.

    Raises:
        ValueError: ``library`` holds too little text, as in installations without source files.
    """
    folder = None if cache is None else Path(cache)
    settings = Settings(Words(), min_count, max_vocabulary, vocabulary)
    return corpus_of(embedded_source(library), settings, folder)


def embedded_source(library: str | os.PathLike[str] | None = None) -> Source:
    root = Path(library) if library is not None else Path(sysconfig.get_path("stdlib"))
    files = _source_files(root)
    text = functools.cache(partial(_embedded_text, root, files))  # read when a part is
    name = "docstrings and help topics of Python " + ".".join(map(str, sys.version_info[:3]))
    parts = {
        split: Part(
            f"{name}: the part {split}",
            partial(_embedded_lines, text, split),
            partial(lambda of: len(text()[of]), split),
        )
        for split in SPLITS
    }
    return Source(name, parts, parts["train"].pieces, partial(_installation, root, files))


def prose(text: str) -> Iterator[str]:
    """Paragraphs of English in a docstring or help topic, without interactive examples, literal
    blocks after ``::``, grammar, tables, underlines of headings, and much code."""
    literal_indent: int | None = None
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        if not block.strip():
            continue
        lines = [line for line in block.split("\n") if line.strip()]
        indent = min(len(line) - len(line.lstrip()) for line in lines)
        if literal_indent is not None and indent > literal_indent:
            continue
        literal_indent = indent if block.rstrip().endswith("::") else None
        lines = [line for line in lines if any(character.isalnum() for character in line)]
        before = takewhile(lambda line: not line.lstrip().startswith(_EXAMPLE), lines)
        plain = " ".join(line for line in before if "::=" not in line)
        paragraph = " ".join(_QUOTE.sub("", _ROLE.sub("", plain)).split())
        words = re.findall(r"[A-Za-z]{2,}", paragraph)
        if len(words) >= 3 and 10 * len(_CODE_MARKS.findall(paragraph)) < sum(map(len, words)):
            yield paragraph


def docstrings(source: bytes) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, in order of the source; nothing where it
    does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield docstring
        children: list[ast.AST] = []
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            nested = getattr(node, block, None)
            if isinstance(nested, list):  # expressions hold no docstrings
                children.extend(nested)
        pending.extend(reversed(children))


def help_topics(source: bytes) -> dict[str, str]:
    """The dictionary of help topics in the source of ``pydoc_data.topics``; empty if it is not
    there."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    topics: dict[str, str] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(
            statement.value, ast.Dict
        ):
            for nodes in zip(statement.value.keys, statement.value.values, strict=True):
                name, text = (getattr(node, "value", None) for node in nodes)
                if isinstance(name, str) and isinstance(text, str):
                    topics[name] = textwrap.dedent(text)
    return topics


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """A context without cyclic garbage collection: syntax trees have no cycles, and traversing them
    repeatedly doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _source_files(root: Path) -> list[Path]:
    """Python files below ``root`` in order of their names, those of installed packages left out."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _installation(root: Path, files: list[Path]) -> str:
    """By names and sizes: reading all files would take seconds."""
    digest = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\n".encode())
    version = ".".join(map(str, sys.version_info[:3]))
    return f"embedded: Python {version}, {_EMBEDDED_VERSION}, {digest.hexdigest()}"


def _documents(root: Path, files: Iterable[Path]) -> Iterator[tuple[str, list[str]]]:
    for file in files:
        name = file.relative_to(root).as_posix()
        try:
            source = file.read_bytes()
        except OSError:
            continue
        if name == "pydoc_data/topics.py":
            for topic, text in sorted(help_topics(source).items()):
                yield f"topic {topic}", [text]
        else:
            yield name, list(docstrings(source))


def _part_of(name: str) -> str:
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if bucket < _HELD_OUT_PERCENT:
        return "test"
    return "valid" if bucket < 2 * _HELD_OUT_PERCENT else "train"


def _embedded_text(root: Path, files: list[Path]) -> dict[str, bytes]:
    lines: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    documents = track(_documents(root, files), "reading the docstrings of Python", len(files))
    with _collection_paused():
        for name, texts in documents:
            part = lines[_part_of(name)]
            for paragraph in itertools.chain.from_iterable(map(prose, texts)):
                if paragraph not in seen:
                    seen.add(paragraph)
                    part.extend(sentences(tokenize(paragraph)))
    if min(sum(map(len, part)) for part in lines.values()) < 100:
        raise ValueError(
            f"{root}: this Python installation has too few docstrings for a corpus; "
            f"give a text of your own"
        )
    counts = Counter(word for line in lines["train"] for word in line)
    vocabulary = Vocabulary.from_counts(counts, min_count=2, max_size=VOCABULARY_SIZE)

    def joined(line: list[str]) -> str:
        known = (word if word in vocabulary else UNKNOWN for word in line if word != END)
        return " ".join(known) + "\n"

    return {split: "".join(map(joined, part)).encode() for split, part in lines.items()}


def _embedded_lines(text: Callable[[], Mapping[str, bytes]], split: str) -> Iterator[str]:
    for line in text()[split].splitlines(keepends=True):
        yield line.decode()


# Datasets
#
# Texts that the package ``datasets`` reads: from the hub, from compressed files and tables, from
# folders of such files, and from folders that its ``save_to_disk`` wrote.

PREFIX = "hf:"
_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_FILE_NAMES = {  # of a split in the path of a file
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
_FORMATS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_ROWS = 1000


def is_dataset(place: Path) -> bool:
    """Whether the package reads this file or folder: a table or compressed text by its name, a
    folder with such files or one that ``save_to_disk`` wrote."""
    return _is_saved(place) or bool(_table_files(place))


def _is_saved(folder: Path) -> bool:
    one = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return one or (folder / "dataset_dict.json").is_file()


def _table_files(place: Path) -> dict[str, list[Path]]:
    """The files that the package reads in a folder, or the one file, by the splits that their paths
    name; all as train where none does."""
    inside = sorted(place.rglob("*")) if place.is_dir() else [place]
    files: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for file in inside:
        name = file.relative_to(place).as_posix()
        if file.is_file() and _table_format(file) and not re.search(r"(^|/)\.\w", name):
            words = re.findall("[a-z]+", name.lower())
            named = [_FILE_NAMES[word] for word in words if word in _FILE_NAMES]
            (files.setdefault(named[-1], []) if named else unnamed).append(file)
    return files or ({"train": unnamed} if unnamed else {})


def _table_format(file: Path) -> str | None:
    """The format of a file by its name; None: text that is not compressed."""
    *others, last = ["", *(suffix.lower() for suffix in file.suffixes)]
    if last in _COMPRESSED:
        return _FORMATS.get(others[-1], "text")
    return _FORMATS.get(last)


def dataset_source(data: str, column: str | None = None, *, held_out: bool = False) -> Source:
    """The splits train, validation and test (``held_out``: the last two, of which one suffices) of
    a dataset, with one line per row. A row with line breaks is several lines; a row without a value
    is skipped. The split train alone is one text, as a file is.

    Args:
        data: ``hf:NAME`` or ``hf:NAME:CONFIG``, a dataset of the hub; or a path, of which
            :func:`is_dataset`.
        column: the column of text; None: ``text``, or the only one.
        held_out: whether the text is only to be scored.

    Raises:
        ValueError: the package is missing, the dataset cannot be loaded, or a split or the column
            is missing.
    """
    package = optional_package("datasets", f"--data {data}", "data")
    place, files = Path(data), {}
    if data.startswith(PREFIX):
        name, config = _hub_name(data)
        title = name if config is None else f"{name} {config}"
        load = partial(package.load_dataset, name, config)
    else:
        title = place.resolve().name
        if _is_saved(place):
            files = {"": sorted(place.rglob("*.arrow"))}
            load = partial(package.load_from_disk, data)
        else:
            files = _table_files(place)
            load = _loader(package, title, files)
    try:
        found = load()
    except Exception as error:  # of the package, the hub, the network or the disk
        causes = (str(part) for part in (error, error.__cause__) if part is not None)
        reason = ": ".join(filter(None, causes))
        raise ValueError(f"{title}: the dataset cannot be loaded: {reason}") from error
    splits = _chosen(found if isinstance(found, dict) else {"train": found}, title, held_out)
    first, *others = splits.values()
    column = _column(first.features, title, column)
    for rows in others:
        _column(rows.features, title, column)
    splits = {split: rows.select_columns([column]) for split, rows in splits.items()}
    parts = {
        split: Part(
            f"{title}: the {f'split {_SPLITS[split]}' if split in SPLITS else 'text'}",
            partial(_rows, rows, column),
            partial(getattr, rows.data, "nbytes"),
        )
        for split, rows in splits.items()
    }
    first = next(iter(splits.values()))
    if WHOLE in splits:
        first = first.select(range(int(len(first) * TRAIN_SHARE)))
    content = partial(_dataset_fingerprint, splits, place, files, column)
    return Source(title, parts, partial(_rows, first, column), content)


def _hub_name(data: str) -> tuple[str, str | None]:
    name, _, config = data.removeprefix(PREFIX).partition(":")
    if not name or ":" in config or os.path.isdir(name):
        got = f"a folder; give --data {name}" if os.path.isdir(name) else quoted(data)
        raise ValueError(f"--data: expected {PREFIX}NAME[:CONFIG], a dataset of the hub, got {got}")
    return name, config or None


def _loader(package: Any, title: str, files: Mapping[str, Sequence[Path]]) -> partial[Any]:
    """A function that loads files. Raises ValueError if they have several formats or need another
    package."""
    every = [*chain.from_iterable(files.values())]
    formats = sorted({str(_table_format(file)) for file in every})
    if len(formats) > 1:
        raise ValueError(f"{title}: expected files of one format, got {' and '.join(formats)}")
    if any(file.suffix.lower() == ".zst" for file in every):
        optional_package("zstandard", f"--data {title}", "data")
    options = {"sep": "\t"} if formats == ["tsv"] else {}
    paths = {
        split: [glob.escape(str(file.resolve())) for file in some] for split, some in files.items()
    }
    builder = "csv" if options else formats[0]
    return partial(package.load_dataset, builder, data_files=paths, **options)


def _chosen(found: Mapping[str, Any], title: str, held_out: bool) -> dict[str, Any]:
    """The parts to read. Raises ValueError for a missing one."""
    if [*found] == ["train"]:
        return {TEXT if held_out else WHOLE: found["train"]}
    needed = HELD_OUT if held_out else SPLITS
    *others, last = (_SPLITS[split] for split in needed)
    missing = [_SPLITS[split] for split in needed if _SPLITS[split] not in found]
    if missing and (not held_out or len(missing) == len(needed)):
        expected = f"the splits {', '.join(others)} {'or' if held_out else 'and'} {last}"
        raise ValueError(
            f"{title}: expected {expected}, missing {', '.join(missing)}; "
            f"there are {', '.join(map(str, found)) or 'none'}"
        )
    return {split: found[_SPLITS[split]] for split in needed if _SPLITS[split] in found}


def _column(features: Mapping[str, Any], title: str, column: str | None) -> str:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in features.items()}
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
    if column is None and "text" in texts:
        return "text"
    if column is None and len(texts) == 1:
        return texts[0]
    if column is None or column not in texts:
        got = "none" if column is None else quoted(column)
        known = f"one of {', '.join(texts)}, got {got}"
        if not texts:
            known = f"whose columns are {', '.join(kinds) or 'none'}"
        raise ValueError(f"--column: expected a column of text of {title}, {known}")
    return column


def _rows(rows: Any, column: str) -> Iterator[str]:
    for batch in rows.iter(batch_size=_ROWS):
        for text in batch[column]:
            if text is not None:
                for line in text.removesuffix("\n").split("\n"):
                    yield f"{line}\n"


def _dataset_fingerprint(
    splits: Mapping[str, Any], place: Path, files: Mapping[str, Iterable[Path]], column: str
) -> str:
    if not files:
        found = {split: rows._fingerprint for split, rows in splits.items()}
        return f"datasets: {found} {column}"
    names = {
        split: [file.relative_to(place).as_posix() for file in some]
        for split, some in files.items()
    }
    content = hash_files(chain.from_iterable(files.values()))
    return f"datasets, files: {names} {content} {column}"


# A corpus by its path
#
# A corpus by its path, for every kind of text.


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    column: str | None = None,
    min_count: int | None = None,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    tokenizer: str | Tokenizer | None = None,
) -> Corpus:
    """The corpus at ``path``.

    - A folder with ``train.txt``, ``valid.txt`` and ``test.txt``, or names such as
      ``ptb.train.txt``, ``wiki.valid.tokens`` and ``val.txt``: the layout of the Penn Treebank and
      WikiText. Words are separated by white space, and every line, even an empty one, ends with
      ``<eos>``, which is added unless it is there.
    - A text file, or a pipe: lower-cased words and punctuation marks
      (:func:`hstree.lm.data.tokenize`), empty lines skipped. The first 90% of the tokens are the
      training part, the next 5% the validation part and the last 5% the test part.
    - What the package ``datasets`` reads: a JSON Lines, JSON, CSV, TSV or Parquet file or a
      compressed text (gz, zst, bz2, xz); a folder of such files, of which the paths may name the
      parts (``train-0001.jsonl``, ``dev.jsonl``, ``test/0001.jsonl``); a folder that its
      ``save_to_disk`` wrote; ``hf:NAME[:CONFIG]``, a dataset of the hub. Three parts are read as a
      folder of texts is, and one as a text file, with one line per row.
    - None: the embedded corpus (:func:`hstree.lm.data.embedded_corpus`).

    Words of the validation and test part that are not in the vocabulary become ``<unk>``.

    The ids are in a memory-mapped file: in the cache of the user, which is used
    again for the same text, tokenizer and settings, or in a temporary file.

    Args:
        path: path or name of the text.
        column: the column of text of a dataset. None: the only one, or ``text``.
        min_count: words that occur fewer times in the training part become ``<unk>``. None: 2 for
            the words of a single text file, else 1.
        max_vocabulary: largest number of classes, ``<unk>`` and ``<eos>`` included.
        vocabulary: use this vocabulary; ``min_count`` and ``max_vocabulary`` are then ignored.
        tokenizer: path of a ``tokenizer.json`` of the package ``tokenizers``; or ``"bpe"``,
            byte-pair encoding learned from the training part (of a single text: its first 90%)
            with ``max_vocabulary`` classes; or any tokenizer. None: split at white space, or into
            lower-cased words for a single text and the embedded corpus.

    Raises:
        ValueError: ``path`` does not exist, a part is missing, empty, too short or not UTF-8, the
            column is missing, the vocabulary has fewer than two words, or a package is missing.
    """
    splitter = None if tokenizer is None else _named_tokenizer(tokenizer, max_vocabulary)
    source = _source(path, column)
    if splitter is None:
        splitter = Words() if path is None or WHOLE in source.parts else WhiteSpace()
    if min_count is None:
        min_count = 2 if path is not None and isinstance(splitter, Words) else 1
    return corpus_of(source, Settings(splitter, min_count, max_vocabulary, vocabulary))


def load_held_out(
    path: str | os.PathLike[str],
    *,
    column: str | None = None,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
) -> HeldOut:
    """A text to score.

    Args:
        path: as in :func:`load_corpus`. Of a folder or dataset: its validation and its test part,
            of which one suffices; of a single text: all of it.
        column: as in :func:`load_corpus`.
        vocabulary: other words become ``<unk>``.
        tokenizer: splits the lines.

    Raises:
        ValueError: ``path`` does not exist or has no such part, or a package is missing.
    """
    source = _source(path, column, held_out=True)
    entry = entry_of(source, Settings(tokenizer, vocabulary=vocabulary))
    return HeldOut(source.name, entry.parts, entry.lengths)


def _source(
    path: str | os.PathLike[str] | None, column: str | None, *, held_out: bool = False
) -> Source:
    place = Path(path or "")
    if path is not None and os.fspath(path).startswith(PREFIX):
        return dataset_source(os.fspath(path), column, held_out=held_out)
    if path is not None and not os.path.exists(place):  # whatever the name
        raise ValueError(f"{place}: no such file or folder")
    texts = path is not None and place.is_dir() and has_texts(place)
    if path is not None and not texts and is_dataset(place):
        return dataset_source(str(place), column, held_out=held_out)
    if column is not None:
        raise ValueError(f"--column: expected a text with columns, got {path or 'no --data'}")
    if path is None:
        return embedded_source()
    read = folder_source if place.is_dir() else file_source
    return read(place, held_out=held_out)


def _named_tokenizer(
    tokenizer: str | Tokenizer, max_vocabulary: int | None
) -> Tokenizer | Literal["bpe"]:
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == BPE:
        check_bpe_size(max_vocabulary)
        return "bpe"
    return Subwords.load(tokenizer)


# Batches
#
# Token streams as batches for truncated backpropagation through time.

IGNORE = -100


class Streams:
    """A text of n tokens, split into B parallel streams.

    Stream b reads ``tokens[b L : (b + 1) L]`` and predicts ``tokens[b L + 1 : (b + 1) L + 1]``,
    with ``L = ceil((n - 1) / B)``. Every token except the first is a target exactly once. Positions
    beyond the end of the text hold token 0 and target ``ignore_index``. Only the tokens of the
    requested window are read, so the text may be a memory map of any size.

    Args:
        tokens: class ids [n] of any integer type; not copied.
        batch_size: number of streams, B, at most n - 1.
        ignore_index: target of the positions beyond the end.

    Raises:
        ValueError: ``tokens`` are not integers in one dimension, ``batch_size`` < 1, or too few
            tokens for it.
    """

    def __init__(
        self, tokens: npt.ArrayLike, batch_size: int, *, ignore_index: int = IGNORE
    ) -> None:
        array: npt.NDArray[Any] = np.asarray(tokens)
        if array.ndim != 1 or (len(array) and not np.issubdtype(array.dtype, np.integer)):
            raise ValueError(
                f"tokens: expected integers in one dimension, got {array.dtype} "
                f"of shape {array.shape}"
            )
        if batch_size < 1:
            raise ValueError(f"batch_size: expected at least 1, got {batch_size}")
        n_targets = len(array) - 1
        if n_targets < batch_size:
            raise ValueError(
                f"batch_size: expected at least {batch_size + 1} tokens for a batch size of "
                f"{batch_size}, got {len(array)}"
            )
        self.batch_size = batch_size
        self.ignore_index = ignore_index
        self._length = length = -(-n_targets // batch_size)
        full = n_targets // length  # streams without a gap
        self._tokens = array[: full * length].reshape(full, length)
        self._target = array[1 : full * length + 1].reshape(full, length)
        self._rest = array[full * length :]  # of the stream that may end early

    def __len__(self) -> int:
        """Number of time steps, L."""
        return self._length

    def window(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the ``t = min(length, L - start)`` time steps from ``start`` on:
        int64 [t, B], on the CPU.

        Raises:
            ValueError: ``start`` is outside [0, L) or ``length`` < 1.
        """
        if not 0 <= start < self._length:
            raise ValueError(f"start: expected 0 to {self._length - 1}, got {start}")
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        stop = min(start + length, self._length)
        shape = (stop - start, self.batch_size)
        full = len(self._tokens)
        tokens, target = np.empty(shape, np.int64), np.empty(shape, np.int64)
        tokens[:, :full] = self._tokens[:, start:stop].T
        target[:, :full] = self._target[:, start:stop].T
        if full < self.batch_size:
            tokens[:, full:] = 0
            target[:, full:] = self.ignore_index
            rest = self._rest[start : stop + 1]
            if len(rest) > 1:
                tokens[: len(rest) - 1, full] = rest[:-1]
                target[: len(rest) - 1, full] = rest[1:]
        return torch.from_numpy(tokens), torch.from_numpy(target)

    def windows(self, length: int, stop: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive windows of ``length`` time steps, of the first ``stop`` or all; the last may
        be shorter. Raises ValueError if ``length`` < 1."""
        if length < 1:
            raise ValueError(f"length: expected at least 1, got {length}")
        end = self._length if stop is None else min(stop, self._length)
        return (self.window(start, min(length, end - start)) for start in range(0, end, length))
