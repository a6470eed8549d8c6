"""Corpora, vocabularies, tokenizers and batches."""

from __future__ import annotations

import ast
import gc
import glob
import hashlib
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
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hstree._checks import check_int
from hstree._files import write_atomic
from hstree._progress import Task, track
from hstree.lm.report import optional_package, quoted
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
    "learn_bpe",
    "load_corpus",
    "load_held_out",
    "prompt_words",
    "sentences",
    "tokenize",
]

_Text = TypeVar("_Text")

# Words: the rules by which a text that is not tokenized already is split, and their reverse.

_MODIFIERS = range(0x1F3FB, 0x1F400)  # the colors of emoji
_INNER = r".'\u00b7\u05be\u05f3\u05f4-"  # of words: also the Catalan dot, Hebrew hyphen and quotes
_SPACE = 0x200B  # a format character in name only: it ends a word
_STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
    | dict.fromkeys("\u2010\u2011\u2013\u2014", "-")
)
_SENTENCE_END = frozenset({".", "?", "!"})
_CLOSING = frozenset({")", "]", '"', "'"})
_ABROAD = "\u0964\u0965\u060c\u061b\u061f"  # dandas; comma, semicolon, question mark of Arabic
_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%" + _ABROAD) | {"...", "n't"}
_NO_SPACE_AFTER = frozenset("([{$#@")


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


def tokenize(text: str) -> list[str]:
    """Lower-cased words and punctuation marks of ``text`` in Unicode NFC, in order.

    A word is a run of letters, digits and underscores that may be joined by inner apostrophes,
    hyphens and dots. Every other visible character is a token. What extends a character, such as an
    accent or a vowel sign, belongs to its token. Scripts that write no spaces between words need
    another tokenizer.

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


def detokenize(words: Iterable[str]) -> str:
    """Readable text from tokens: no space before closing marks or after opening ones, a new line at
    each ``<eos>``.

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
        if word == END:
            pieces.append("\n")
            glue, quote_open = True, False
            continue
        closes = word in _NO_SPACE_BEFORE or (word[0] == "'" and word[1:].isalpha())
        if word == '"':
            closes, quote_open = quote_open, not quote_open
        if not glue and not closes:
            pieces.append(" ")
        pieces.append(word)
        glue = word in _NO_SPACE_AFTER or (word == '"' and quote_open)
    return "".join(pieces).strip("\n")


# The words of a corpus and their class ids.

UNKNOWN, END = "<unk>", "<eos>"
DIGITS = 18
"""Of a frequency in a file: fewer than an int64 may have."""


class Vocabulary:
    """V words, numbered from 0, with the number of times each occurs in the training text.

    Args:
        words: the V words by class id; distinct, without white space, ``<unk>`` and ``<eos>`` among
            them.
        frequencies: V non-negative counts.

    Raises:
        ValueError: for other words or counts.
    """

    def __init__(
        self, words: Sequence[str], frequencies: Sequence[int] | npt.NDArray[np.int64]
    ) -> None:
        self.words: tuple[str, ...] = tuple(words)
        self.frequencies: npt.NDArray[np.int64] = np.asarray(frequencies, dtype=np.int64)
        if self.frequencies.shape != (len(self.words),) or (self.frequencies < 0).any():
            raise ValueError(
                f"frequencies: expected one count of at least 0 for each of {len(self.words)} "
                f"words, got {quoted(self.frequencies.tolist())}"
            )
        self._index: dict[str, int] = {}
        for position, word in enumerate(self.words):
            if word.split() != [word]:
                raise ValueError(
                    f"words[{position}]: expected a word without white space, got {quoted(word)}"
                )
            first = self._index.setdefault(word, position)
            if first != position:
                raise ValueError(f"words[{position}]: {quoted(word)} is already words[{first}]")
        for marker in (UNKNOWN, END):
            if marker not in self._index:
                raise ValueError(f"words: the marker {marker} is missing")

    @classmethod
    def from_counts(
        cls, counts: Mapping[str, int], *, min_count: int = 1, max_size: int | None = None
    ) -> Vocabulary:
        """The vocabulary of a text with the given word counts.

        Classes are sorted by decreasing frequency (ties in alphabetical order), as
        :class:`torch.nn.AdaptiveLogSoftmaxWithLoss` requires. Words that occur fewer than
        ``min_count`` times, and the rarest beyond ``max_size`` (which counts ``<unk>`` and
        ``<eos>``), are left out; their occurrences count as ``<unk>``.

        Raises:
            ValueError: ``min_count`` < 1 or ``max_size`` < 4, or fewer than two words remain in
                addition to the markers.
        """
        check_int("min_count", min_count)
        most = None if max_size is None else check_int("max_size", max_size, 4) - 2
        frequency = dict(counts)

        def rank(word: str) -> tuple[int, str]:
            return -frequency[word], word

        kept = {word for word, n in counts.items() if n >= min_count} - {UNKNOWN, END}
        known = sorted(kept, key=rank)[:most]
        if len(known) < 2:
            rule = "" if min_count == 1 else f" that occur at least {min_count} times"
            found = f"only {quoted(known[0])}" if known else "none"
            raise ValueError(
                f"the vocabulary needs at least two different words{rule}, "
                f"the training text has {found}"
            )
        frequency[END] = counts.get(END, 0)
        frequency[UNKNOWN] = sum(counts.values()) - sum(frequency[word] for word in [*known, END])
        words = sorted([*known, UNKNOWN, END], key=rank)
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
        return [self._index.get(word, unknown) for word in words]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Words of class ids. Raises ValueError for an id outside [0, V)."""
        if len(ids) and not 0 <= min(ids) <= max(ids) < len(self.words):
            raise ValueError(f"ids: expected class ids in [0, {len(self)}), got {quoted(ids)}")
        return [self.words[class_id] for class_id in ids]

    def to_bytes(self) -> bytes:
        """One line ``word<TAB>frequency`` for each class, in order of class id, as UTF-8."""
        rows = zip(self.words, self.frequencies.tolist(), strict=True)
        return "".join(f"{word}\t{count}\n" for word, count in rows).encode()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file of :meth:`to_bytes`. Raises ValueError that names the file and line where it
        is not that."""
        words, counts = [], []
        try:
            *lines, rest = Path(path).read_bytes().decode().split("\n")
            for number, line in enumerate(lines, start=1):
                word, _, count = line.partition("\t")
                if not count.isdecimal() or len(count) > DIGITS:
                    raise ValueError(
                        f"line {number}: expected word<TAB>frequency, of at most {DIGITS} digits, "
                        f"got {quoted(line)}"
                    )
                words.append(word)
                counts.append(int(count))
            if rest or not lines:
                raise ValueError("it is truncated: its last line does not end")
            return cls(words, counts)
        except ValueError as error:  # also of characters that are not UTF-8
            raise ValueError(f"{path}: not a vocabulary file: {error}") from None

    def __len__(self) -> int:
        return len(self.words)

    def __contains__(self, word: object) -> bool:
        return word in self._index

    def __getitem__(self, word: str) -> int:
        """Class id of a word of the vocabulary. Raises KeyError for any other."""
        return self._index[word]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and self.to_bytes() == other.to_bytes()

    __hash__ = None  # type: ignore[assignment]


# Tokenizers: lines of text to tokens, and tokens back to text.

BPE = "bpe"
_FLAG = "--tokenizer"
_BYTES = 256
_FOREIGN = "\u0416\u00e9\u4e2d\U0001f600"  # characters that few alphabets have


class Tokenizer:
    """The interface of tokenizers. Tokens are not empty and have no white space; line ends are not
    tokens.

    Attributes:
        keeps_empty_lines: whether a line without tokens is a line of the corpus, with an ``<eos>``
            of its own.
    """

    keeps_empty_lines = True

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Tokens of each line, without its line end."""
        raise NotImplementedError

    def split(self, line: str) -> list[str]:
        """Tokens of one line."""
        return self.split_batch([line])[0]

    def join(self, tokens: Iterable[str]) -> str:
        """Readable text; each ``<eos>`` ends a line."""
        return detokenize(tokens)


class WhiteSpace(Tokenizer):
    """Splits at white space, for texts that are tokenized already."""

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Words of each line."""
        return [line.split() for line in lines]


class Words(Tokenizer):
    """Lower-cased words and punctuation marks: :func:`hstree.lm.data.tokenize` and
    :func:`hstree.lm.data.detokenize`. Empty lines are skipped."""

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
        tokenizer: a ``tokenizers.Tokenizer``, or the content of a ``tokenizer.json``.

    Raises:
        ValueError: the package is missing, the content is not valid, two tokens have the same name,
            or there are characters without a token, which would be missing in the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        data = tokenizer if isinstance(tokenizer, bytes) else tokenizer.to_str().encode()
        self.data: bytes = data
        package = optional_package("tokenizers", _FLAG, "data")
        try:
            self._tokenizer = package.Tokenizer.from_str(data.decode())
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(
                f"not a tokenizer of the package tokenizers (tokenizer.json): {error}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._words = {
            number: token if token.split() == [token] else f"<token:{number}>"
            for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items()
        }
        self._ids = {word: number for number, word in self._words.items()}
        if len(self._ids) != len(self._words):
            raise ValueError("not a usable tokenizer: two of its tokens have the same name")
        for character in _FOREIGN:
            text = self.join(self.split(character))
            if not text or "\ufffd" in text:
                raise ValueError(
                    f"not a usable tokenizer: it leaves out characters such as {character!r}; "
                    f"expected one that has a token for each byte, or one for what is unknown"
                )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Subwords:
        """The tokenizer in a file. Raises ValueError that names the file if it is not valid."""
        if not os.path.isfile(path):  # whatever the name
            raise ValueError(f"{_FLAG}: {path}: no such file")
        try:
            return cls(Path(path).read_bytes())
        except ValueError as error:
            message = str(error).removeprefix(f"{_FLAG}: ")
            raise ValueError(f"{_FLAG}: {path}: {message}") from None

    def split_batch(self, lines: Sequence[str]) -> list[list[str]]:
        """Tokens of each line; lines are spread over the threads of the package."""
        bare = [_without_end(line) for line in lines]
        try:
            encodings = self._tokenizer.encode_batch_fast(bare, add_special_tokens=False)
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{_FLAG}: the tokenizer cannot split the text: {error}") from None
        words = self._words
        return [[words[number] for number in encoding.ids] for encoding in encodings]

    def join(self, tokens: Iterable[str]) -> str:
        """Text by the decoder of the tokenizer. ``<eos>`` becomes a line end; a token that the
        tokenizer does not have, such as ``<unk>``, is not changed."""
        text = ""
        for known, run in groupby(tokens, lambda token: token in self._ids and token != END):
            if known:
                numbers = [self._ids[token] for token in run]
                text += self._tokenizer.decode(numbers, skip_special_tokens=False)
            else:
                text += "".join("\n" if token == END else token for token in run)
        return text


_NAMED: dict[str, type[Tokenizer]] = {"white space": WhiteSpace, "words": Words}


def tokenizer_to_bytes(tokenizer: Tokenizer) -> bytes:
    """What :func:`tokenizer_from_bytes` reads: the JSON of a :class:`Subwords`, or the name of one
    of the others. Raises TypeError for a tokenizer of another class."""
    if isinstance(tokenizer, Subwords):
        return tokenizer.data
    for name, kind in _NAMED.items():
        if type(tokenizer) is kind:
            return json.dumps({"hstree": name}).encode()
    raise TypeError(f"tokenizer: expected one of hstree.lm.data, got {type(tokenizer).__name__}")


def tokenizer_from_bytes(data: bytes) -> Tokenizer:
    """The tokenizer that :func:`tokenizer_to_bytes` wrote. Raises ValueError for anything else."""
    for kind in _NAMED.values():
        if data == tokenizer_to_bytes(kind()):
            return kind()
    return Subwords(data)


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
    if max_vocabulary is None or max_vocabulary < _BYTES + 2:
        raise ValueError(
            f"--max-vocabulary: expected a number of classes to learn, at least {_BYTES + 2} with "
            f"{_FLAG} {BPE} ({_BYTES} bytes, {UNKNOWN}, {END}), got {max_vocabulary}"
        )
    package = optional_package("tokenizers", _FLAG, "data")
    tokenizer = package.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        map(_without_end, lines),
        vocab_size=max_vocabulary - 2,
        min_frequency=2,
        show_progress=False,
    )
    return Subwords(tokenizer)


def _without_end(line: str) -> str:
    return line[:-1].removesuffix("\r") if line.endswith("\n") else line


def prompt_words(
    prompt: str, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Words of a prompt. With subwords: their tokens, with ``<eos>`` for line ends. Without: pieces
    between white space that are in the vocabulary, and other pieces tokenized as text files are."""
    if isinstance(tokenizer, Subwords):
        first, *others = tokenizer.split_batch(prompt.split("\n"))
        return [*first, *(token for line in others for token in (END, *line))]
    words: list[str] = []
    for piece in prompt.split():
        words.extend([piece] if piece in vocabulary else tokenize(piece))
    return words


# Texts before tokenization: their location and how their lines are read.

SPLITS = ("train", "valid", "test")
HELD_OUT = ("valid", "test")
WHOLE, TEXT = "whole", "text"
_SPLIT_NAMES = {"train": "train", "valid": "valid|val|validation", "test": "test"}
TRAIN_SHARE, VALID_SHARE = 0.90, 0.05
_PIECE = 1 << 18


class Part(NamedTuple):
    """One part of a text: its name in error messages; a function that yields the first share of the
    text, in pieces of at most one line, of which one that does not end in a newline continues in
    the next; about the number of its characters."""

    label: str
    pieces: Callable[[float], Iterator[str]]
    size: int


class Source(NamedTuple):
    """A text that can be read several times and is never held in memory as a whole: a name for
    people, its parts, and a string that identifies the content.

    The parts are train, valid and test, or one ``WHOLE`` that is split after tokenization. Of a
    text that is only to be scored: valid and test, or one of them, or one ``TEXT``, which is not
    split.
    """

    name: str
    parts: dict[str, Part]
    fingerprint: str


def _needed(
    found: Mapping[str, _Text], title: str, held_out: bool, suffix: str = ""
) -> dict[str, _Text]:
    """The parts to read. Raises ValueError if one is missing; for scoring one suffices."""
    needed = HELD_OUT if held_out else SPLITS
    chosen = {split: found[split] for split in needed if split in found}
    if not chosen or (len(chosen) < len(needed) and not held_out):
        expected = (" or " if held_out else ", ").join(split + suffix for split in needed)
        missing = ", ".join(split + suffix for split in needed if split not in found)
        raise ValueError(
            f"{title}: expected the parts {expected}, missing {missing}; "
            f"there are {', '.join(found) or 'none'}"
        )
    return chosen


def _text_files(folder: Path) -> dict[str, Path]:
    """The files of the parts in a folder, ``train.txt``, ``valid.txt`` and ``test.txt`` or names
    such as ``ptb.train.txt``, ``wiki.valid.tokens``, ``val.txt`` and ``test.raw``. Raises
    ValueError if several could be meant."""
    found = {}
    for split, names in _SPLIT_NAMES.items():
        pattern = re.compile(rf"([^.]+\.)?({names})\.(txt|tokens|raw)")
        files = {f.name: f for f in folder.iterdir() if pattern.fullmatch(f.name) and f.is_file()}
        usual = f"{split}.txt"
        if len(files) > 1 and usual not in files:
            raise ValueError(
                f"{folder}: expected one file for the part {split}, got "
                f"{', '.join(sorted(files))}; name one of them {usual}"
            )
        if files:
            found[split] = files.get(usual) or next(iter(files.values()))
    return found


def _file_source(name: str, files: Mapping[str, Path]) -> Source:
    parts, content = {}, []
    for part, file in files.items():
        size = os.path.getsize(file)
        parts[part] = Part(f"{file}: the file", partial(_read_pieces, file, size), size)
        digest = hashlib.sha256()
        for block in _bytes_of(file):
            digest.update(block)
        content.append(digest.hexdigest())
    return Source(name, parts, " ".join(content))


def _bytes_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _read_pieces(path: Path, size: int, share: float) -> Iterator[str]:
    """Lines of a UTF-8 file, each with its line end; a byte order mark is skipped. A line of more
    than 256 Ki characters is split into pieces, at white space if there is any. No piece begins
    after the share. Raises ValueError, which names the file and the first byte that is not
    UTF-8."""
    offset, number = 0, 1
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        while offset < int(size * share) and (piece := file.readline(_PIECE)):
            while _PIECE <= len(piece) < 2 * _PIECE and not piece[-1].isspace():
                piece += file.read(1) or "\n"
            try:
                length = len(piece.encode())
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{path}: not UTF-8 text: byte 0x{ord(piece[error.start]) - 0xDC00:02x} at "
                    f"offset {offset + len(piece[: error.start].encode())} (line {number})"
                ) from None
            yield piece if offset else piece.removeprefix("\ufeff")
            offset += length
            number += piece.endswith("\n")


# The docstrings of the standard library and the help topics of :mod:`pydoc` are about 400,000
# tokens of technical English that need no download. Modules are parsed, never imported, so none of
# their code runs. Whole modules and topics are assigned to a part by a hash of their names, so no
# module is in two parts; repeated paragraphs are dropped. Words outside the 10,000 most frequent of
# the training part, and words that occur only once in it, become ``<unk>``.

_EMBEDDED_VERSION = 2
VOCABULARY_SIZE = 10_000
_HELD_OUT_PERCENT = 5
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # of statements
_EXAMPLE = (">>>", "...", "$ ")
_CODE_MARKS = re.compile(r"[^\w\s.,;:!?'\"()-]")
_ROLE = re.compile(
    r":[a-z]+(?::[a-z]+)?:(?=`)|:(?=(?:param|type|return|returns|rtype|raise|raises)\b[^:]*:)"
)
_QUOTE = re.compile(r"(?<!\w)['\u2018\u2019]+|['\u2019]+(?!\w)|[\"\u201c\u201d`*|]")


def _embedded_source() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        files |= {path.relative_to(root).as_posix(): path for path in paths if path.is_file()}
    files = dict(sorted(files.items()))
    lines = cache(partial(_embedded_lines, root, files))  # read when a part is
    version = ".".join(map(str, sys.version_info[:3]))
    title = f"docstrings and help topics of Python {version}"
    # By names and sizes: reading all files would take seconds.
    sizes = {name: path.stat().st_size for name, path in files.items()}

    def part(split: str) -> Part:
        def pieces(_: float) -> Iterator[str]:
            yield from lines()[split]

        return Part(f"{title}: the part {split}", pieces, sum(sizes.values()) // 10)

    return Source(
        title,
        {split: part(split) for split in SPLITS},
        f"{version} {_EMBEDDED_VERSION} {hashlib.sha256(repr(sizes).encode()).hexdigest()}",
    )


def _embedded_lines(root: Path, files: Mapping[str, Path]) -> dict[str, list[str]]:
    """Lines of each part, one sentence each."""
    parts: dict[str, list[list[str]]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    documents = track(_documents(files), "reading the docstrings of Python", len(files))
    collecting = gc.isenabled()
    gc.disable()  # syntax trees have no cycles, and traversing them repeatedly doubles the time
    try:
        for name, texts in documents:
            bucket = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
            split = ("test", "valid", "train")[min(bucket // _HELD_OUT_PERCENT, 2)]
            for paragraph in chain.from_iterable(map(prose, texts)):
                if paragraph not in seen:
                    seen.add(paragraph)
                    parts[split].extend(sentences(tokenize(paragraph)))
    finally:
        if collecting:
            gc.enable()
    if min(sum(map(len, part)) for part in parts.values()) < 100:
        raise ValueError(
            f"{root}: this Python installation has too few docstrings for a corpus; "
            f"give a text of your own"
        )
    counts = Counter(chain.from_iterable(parts["train"]))
    known = Vocabulary.from_counts(counts, min_count=2, max_size=VOCABULARY_SIZE)

    def joined(line: list[str]) -> str:
        return " ".join(word if word in known else UNKNOWN for word in line if word != END) + "\n"

    return {split: [joined(line) for line in part] for split, part in parts.items()}


def _documents(files: Mapping[str, Path]) -> Iterator[tuple[str, Iterable[str]]]:
    from pydoc_data.topics import topics  # large

    for name, path in files.items():
        if name == "pydoc_data/topics.py":
            for topic, text in sorted(topics.items()):
                yield f"topic {topic}", [textwrap.dedent(text)]
        else:
            yield name, docstrings(path.read_bytes())


def prose(text: str) -> Iterator[str]:
    """Paragraphs of English in a docstring or help topic, without interactive examples, literal
    blocks after ``::``, grammar, tables, underlines of headings, and much code."""
    literal_indent: int | None = None
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
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
    pending: list[ast.AST] = []
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pending = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from filter(None, [ast.get_docstring(node)])
        blocks = [getattr(node, name, None) for name in _BLOCKS]
        nested = [block for block in blocks if isinstance(block, list)]  # others are expressions
        pending.extend(reversed([*chain.from_iterable(nested)]))


# Texts that the package ``datasets`` reads: from the hub, from compressed files and tables, from
# folders of such files, and from folders that its ``save_to_disk`` wrote.

PREFIX = "hf:"
_BUILDERS = dict.fromkeys((".jsonl", ".ndjson", ".json"), "json") | {
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_SAVED = ("dataset_dict.json", "dataset_info.json")
_ROWS = 1000


def _is_dataset(place: Path) -> bool:
    """Whether the package reads this file or folder: a table or compressed text by its name, a
    folder with such files or one that ``save_to_disk`` wrote."""
    known = (*_BUILDERS, *_COMPRESSED)
    files = [place] if place.is_file() else (f for f in place.rglob("*") if f.is_file())
    return any(file.suffix.lower() in known or file.name in _SAVED for file in files)


def _dataset_source(data: str, column: str | None, held_out: bool) -> Source:
    """The splits train, validation and test (``held_out``: the last two, of which one suffices) of
    a dataset, with one line per row. A row with line breaks is several lines; a row without a value
    is skipped. The split train alone is one text, as a file is."""
    package = optional_package("datasets", f"--data {data}", "data")
    place = Path(data)
    if data.startswith(PREFIX):
        name, _, config = data.removeprefix(PREFIX).partition(":")
        if not name or ":" in config or os.path.isdir(name):
            got = f"a folder; give --data {name}" if os.path.isdir(name) else quoted(data)
            raise ValueError(
                f"--data: expected {PREFIX}NAME[:CONFIG], a dataset of the hub, got {got}"
            )
        title = f"{name} {config}".strip()
        load = partial(package.load_dataset, name, config or None)
    elif place.is_file():
        title = place.name
        suffixes = [suffix.lower() for suffix in place.suffixes]
        kind = next((suffix for suffix in reversed(suffixes) if suffix not in _COMPRESSED), "")
        options = {"sep": "\t"} if kind == ".tsv" else {}
        files = glob.escape(str(place.resolve()))
        builder = _BUILDERS.get(kind, "text")
        load = partial(package.load_dataset, builder, data_files=files, **options)
    else:
        title = place.resolve().name
        saved = any((place / name).is_file() for name in _SAVED)
        load = partial(package.load_from_disk if saved else package.load_dataset, data)
    try:
        found = load()
    except Exception as error:  # of the package, the hub, the network or the disk
        causes = (str(part) for part in (error, error.__cause__) if part is not None)
        reason = ": ".join(filter(None, causes))
        raise ValueError(f"{title}: the dataset cannot be loaded: {reason}") from error
    splits: dict[str, Any] = dict(found) if isinstance(found, dict) else {"train": found}
    if [*splits] == ["train"]:
        splits = {TEXT if held_out else WHOLE: splits["train"]}
    else:
        splits = {"valid" if name == "validation" else name: rows for name, rows in splits.items()}
        splits = _needed(splits, title, held_out)
    parts, prints = {}, []
    for split, rows in splits.items():
        rows = rows.select_columns([_column(rows.features, title, column)])
        label = f"{title}: the part {split}"
        parts[split] = Part(label, partial(_rows, rows), rows.data.nbytes)
        prints.append(rows._fingerprint)
    return Source(title, parts, f"datasets: {prints}")


def _column(features: Mapping[str, Any], title: str, column: str | None) -> str:
    kinds = {name: getattr(feature, "dtype", None) for name, feature in features.items()}
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string")]
    if column is None and ("text" in texts or len(texts) == 1):
        return "text" if "text" in texts else texts[0]
    if column is None or column not in texts:
        got = "none" if column is None else quoted(column)
        known = f"one of {', '.join(texts)}, got {got}"
        if not texts:
            known = f"whose columns are {', '.join(kinds) or 'none'}"
        raise ValueError(f"--column: expected a column of text of {title}, {known}")
    return column


def _rows(rows: Any, share: float) -> Iterator[str]:
    (column,) = rows.features
    for batch in rows.select(range(int(len(rows) * share))).iter(batch_size=_ROWS):
        for text in batch[column]:
            if text is not None:
                for line in text.removesuffix("\n").split("\n"):
                    yield f"{line}\n"


# Texts to class ids in a file: tokenized once, and kept in the cache.
#
#     NAME.ids     class ids, int32 little-endian: train, valid, test
#     KEY.json     an entry: its fields, the CRC-32 of the ids, and its own CRC-32
#
# KEY is a SHA-256 of the content of the text, the tokenizer, and the vocabulary or its limits. If
# the vocabulary is made from the text, the entry is written under both keys, so that a run, which
# has the vocabulary, finds the ids again. The ids have the name of the key with the vocabulary.

CACHE_VERSION = 4  # increased when a format or the rules of :func:`tokenize` change
TOKEN_TYPE = np.dtype("<i4")
_BATCH_CHARACTERS = 1 << 17
_BLOCK_TOKENS = 1 << 18
_ABANDONED_AFTER = 24 * 3600.0  # seconds without a write


class Length(NamedTuple):
    """The number of characters of a text before tokenization, line ends included, and of its bytes
    in UTF-8."""

    characters: int
    bytes: int


class Entry(NamedTuple):
    """A tokenized text: read-only memory maps of the class ids of each part, the length of each
    (none if they were cut out of one file), the words of the classes and the tokenizer."""

    parts: dict[str, npt.NDArray[np.int32]]
    lengths: dict[str, Length]
    vocabulary: Vocabulary
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Recipe:
    """How a text becomes a corpus: the tokenizer or ``"bpe"``, which learns one from the text; the
    vocabulary, or the limits of the one that is made, as in :meth:`Vocabulary.from_counts`."""

    tokenizer: Tokenizer | str
    vocabulary: Vocabulary | None = None
    min_count: int = 1
    max_vocabulary: int | None = None

    def key(self, content: str) -> str:
        """The name of the entry of a text with the given fingerprint."""
        if isinstance(self.tokenizer, str):
            tokenizer = self.tokenizer.encode()
        else:
            tokenizer = tokenizer_to_bytes(self.tokenizer)
        limits: object = (self.min_count, self.max_vocabulary)
        if self.vocabulary is not None:
            limits = self.vocabulary.to_bytes()
        parts = (CACHE_VERSION, unicodedata.unidata_version, content, tokenizer, limits)
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def user_cache() -> Path | None:
    """The folder named by the environment variable ``HSTREE_CACHE``, or None if the variable is
    empty. If it is not set: ``$XDG_CACHE_HOME/hstree`` or ``~/.cache/hstree``."""
    named = os.environ.get("HSTREE_CACHE")
    if named is not None:
        return Path(named) if named else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "hstree")
    with suppress(RuntimeError):  # no home
        return Path.home() / ".cache" / "hstree"
    return None


def _entry(source: Source, recipe: Recipe) -> Entry:
    """A tokenized text: from the cache, or tokenized and added to it. Without a cache that can be
    written the ids are in an unnamed temporary file.

    Raises ValueError if a part has no words or is too small, or if the vocabulary has fewer than
    two words.
    """
    folder = user_cache()
    if folder is not None:
        with suppress(OSError):  # not writable, or full
            return _cached(source, recipe, folder / "tokens")
    with tempfile.TemporaryDirectory() as temporary:
        return _cached(source, recipe, Path(temporary))


def _cached(source: Source, recipe: Recipe, folder: Path) -> Entry:
    content = f"{', '.join(source.parts)}: {source.fingerprint}"
    file = folder / f"{recipe.key(content)}.json"
    entry = _read_entry(file)
    if entry is None:
        folder.mkdir(parents=True, exist_ok=True)
        for part in folder.glob(".*.part"):  # of a process that was killed
            with suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED_AFTER:
                    shutil.rmtree(part)
        _write_entry(source, recipe, content, file)
        entry = _read_entry(file)
    if entry is None:
        raise OSError(f"{file}: the tokenized text cannot be read back")
    return entry


def _read_entry(file: Path) -> Entry | None:
    """The entry in a file, or None if there is none or it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        fields = json.loads(file.read_bytes())
        ids, check = file.with_name(fields["ids"]), fields.pop("check")
        crc = reduce(lambda crc, block: zlib.crc32(block, crc), _bytes_of(ids), 0)
        if (check, fields["crc32"]) == (_check(fields), crc):
            tokens = np.memmap(ids, TOKEN_TYPE, mode="r")
            parts = np.split(tokens, np.cumsum([*fields["sizes"].values()])[:-1])
            return Entry(
                dict(zip(fields["sizes"], parts, strict=True)),
                {part: Length(*length) for part, length in fields["lengths"].items()},
                Vocabulary(fields["words"], fields["frequencies"]),
                tokenizer_from_bytes(fields["tokenizer"].encode()),
            )
    return None


def _check(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields).encode())


def _write_entry(source: Source, recipe: Recipe, content: str, file: Path) -> None:
    """Tokenizes a text. Only its distinct words are held in memory."""
    tokenizer, vocabulary = recipe.tokenizer, recipe.vocabulary
    if isinstance(tokenizer, str):
        first = next(iter(source.parts.values()))  # train, or the whole text
        share = TRAIN_SHARE if WHOLE in source.parts else 1.0
        batches = _batches(first.pieces(share), "learning byte-pair encoding", first.size)
        tokenizer = learn_bpe(chain.from_iterable(batches), recipe.max_vocabulary)
    index: dict[str, int] = {}  # words in order of first appearance: a text is tokenized once
    with tempfile.TemporaryFile(dir=file.parent) as numbers:
        sizes, lengths = {}, {}
        for name, part in source.parts.items():
            sizes[name], lengths[name] = _write_part(part, tokenizer, index, numbers)
        if WHOLE in sizes:
            sizes, lengths = _cut(source.name, sizes[WHOLE]), {}
        if vocabulary is None:
            counts = np.zeros(len(index), np.int64)
            for block in _blocks(numbers, sizes["train"]):
                counts += np.bincount(block, minlength=len(index))
            found = {word: n for word, n in zip(index, counts.tolist(), strict=True) if n}
            try:
                vocabulary = Vocabulary.from_counts(
                    found, min_count=recipe.min_count, max_size=recipe.max_vocabulary
                )
            except ValueError as error:
                raise ValueError(f"{source.name}: {error}") from None
        class_ids = np.array(vocabulary.encode(index), TOKEN_TYPE)
        check = 0

        def write(path: Path) -> None:
            nonlocal check
            with path.open("wb") as stream:
                for block in _blocks(numbers, sum(sizes.values())):
                    data = class_ids[block].tobytes()
                    check = zlib.crc32(data, check)
                    stream.write(data)

        full = Recipe(tokenizer, vocabulary).key(content)
        write_atomic(file.with_name(f"{full}.ids"), write)
    fields = {
        "ids": f"{full}.ids",
        "crc32": check,
        "sizes": sizes,
        "lengths": lengths,
        "words": vocabulary.words,
        "frequencies": vocabulary.frequencies.tolist(),
        "tokenizer": tokenizer_to_bytes(tokenizer).decode(),
    }
    data = json.dumps(fields | {"check": _check(fields)}).encode()
    for path in {file, file.with_name(f"{full}.json")}:
        write_atomic(path, data)


def _write_part(
    part: Part, tokenizer: Tokenizer, index: dict[str, int], file: BinaryIO
) -> tuple[int, Length]:
    """Appends the numbers of a part's words and line ends to a file; new words are added to
    ``index``. A line whose last word is ``<eos>`` gets no other. Returns how many tokens were
    written, and the length of the text."""
    size = characters = n_bytes = 0
    any_words = is_open = False
    last: str | None = None  # word of the line
    for pieces in _batches(part.pieces(1.0), "tokenizing", part.size):
        ids = array("i")
        for piece, words in zip(pieces, tokenizer.split_batch(pieces), strict=True):
            ids.extend([index.setdefault(word, len(index)) for word in words])
            characters += len(piece)
            n_bytes += len(piece.encode())
            last = words[-1] if words else last
            any_words = any_words or last is not None
            if piece.endswith("\n") or (is_open and not piece):  # the last line may not end
                if last != END and (last is not None or tokenizer.keeps_empty_lines):
                    ids.append(index.setdefault(END, len(index)))
                last = None
            is_open = not piece.endswith("\n")
        file.write(np.array(ids, dtype=TOKEN_TYPE).tobytes())
        size += len(ids)
    if not any_words:
        raise ValueError(f"{part.label} {'has no words' if characters else 'is empty'}")
    return size, Length(characters, n_bytes)


def _cut(name: str, total: int) -> dict[str, int]:
    """The number of tokens of each part of a single text."""
    first, second = int(total * TRAIN_SHARE), int(total * (TRAIN_SHARE + VALID_SHARE))
    sizes = {"train": first, "valid": second - first, "test": total - second}
    if min(sizes.values()) < 2:
        raise ValueError(
            f"{name}: {total} tokens are too few to split 90% / 5% / 5%; expected at least 40"
        )
    return sizes


def _batches(pieces: Iterable[str], description: str, size: int) -> Iterator[list[str]]:
    """Pieces in batches large enough for a call of the tokenizer and small enough for memory, and
    at last an empty piece."""
    batch: list[str] = []
    characters = 0
    with closing(Task(description, size)) as task:
        for piece in pieces:
            batch.append(piece)
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                task.advance(characters)
                batch, characters = [], 0
        yield [*batch, ""]


def _blocks(file: BinaryIO, n_tokens: int) -> Iterator[npt.NDArray[np.int32]]:
    """The first numbers of a file, in blocks."""
    file.seek(0)
    for start in range(0, n_tokens, _BLOCK_TOKENS):
        yield np.fromfile(file, TOKEN_TYPE, min(_BLOCK_TOKENS, n_tokens - start))


# Corpora as streams of class ids, and what heads are built from.


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
        """Word vectors float32 [V, F] of ``tokens``; options are those of
        :func:`hstree.trees.word_vectors`."""
        return word_vectors(self.tokens, len(self.frequencies), **options)

    def unigram_loss(self, tokens: npt.NDArray[np.integer[Any]]) -> float:
        """Mean negative log-probability (nats per token) of ``tokens`` under the unigram
        distribution of this corpus. A class that does not occur in the training text is given half
        the count of the rarest class that does."""
        mass = self.frequencies.astype(np.float64)
        mass[mass == 0] = mass[mass > 0].min() / 2
        log_prob = np.log(mass / mass.sum())
        counts = count_classes(tokens, len(mass))
        return float(-(counts @ log_prob) / counts.sum())


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
        for part in (self.train, self.valid, self.test):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.data)
        return digest.hexdigest()


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
    - A text file: lower-cased words and punctuation marks (:func:`hstree.lm.data.tokenize`), empty
      lines skipped. The first 90% of the tokens are the training part, the next 5% the validation
      part and the last 5% the test part.
    - What the package ``datasets`` reads: a JSON Lines, JSON, CSV, TSV or Parquet file or a
      compressed text (gz, zst, bz2, xz); a folder of such files, of which the paths may name the
      parts (``train-0001.jsonl``, ``dev.jsonl``, ``test/0001.jsonl``); a folder that its
      ``save_to_disk`` wrote; ``hf:NAME[:CONFIG]``, a dataset of the hub. Three parts are read as a
      folder of texts is, and one as a text file, with one line per row.
    - None: the docstrings and help topics of this Python installation, about 10,000 types.
      Paragraphs of prose are kept, code and tables are dropped, and each sentence is a line.

    Words of the validation and test part that are not in the vocabulary become ``<unk>``. The ids
    are in a memory-mapped file: in the cache of the user, which is used again for the same text,
    tokenizer and settings, or in a temporary file.

    Args:
        path: path or name of the text.
        column: the column of text of a dataset. None: the only one, or ``text``.
        min_count: words that occur fewer times in the training part become ``<unk>``. None: 2 for
            the words of a single text file, else 1.
        max_vocabulary: largest number of classes, ``<unk>`` and ``<eos>`` included.
        vocabulary: use this vocabulary; ``min_count`` and ``max_vocabulary`` are then ignored.
        tokenizer: path of a ``tokenizer.json`` of the package ``tokenizers``; or ``"bpe"``,
            byte-pair encoding learned from the training part (of a single text: its first 90%)
            with ``max_vocabulary`` classes; or a tokenizer. None: split at white space, or into
            lower-cased words for a single text and the embedded corpus.

    Raises:
        ValueError: ``path`` does not exist, a part is missing, empty, too short or not UTF-8, the
            column is missing, the vocabulary has fewer than two words, or a package is missing.
    """
    if isinstance(tokenizer, str) and tokenizer != BPE:
        tokenizer = Subwords.load(tokenizer)
    if tokenizer == BPE and vocabulary is not None:
        raise ValueError(f"tokenizer: expected the one that made the vocabulary, got {BPE!r}")
    source = _source(path, column)
    if tokenizer is None:
        tokenizer = Words() if path is None or WHOLE in source.parts else WhiteSpace()
    if min_count is None:
        min_count = 2 if path is not None and isinstance(tokenizer, Words) else 1
    entry = _entry(source, Recipe(tokenizer, vocabulary, min_count, max_vocabulary))
    return Corpus(
        source.name, entry.vocabulary, **entry.parts,
        tokenizer=entry.tokenizer, lengths=entry.lengths,
    )  # fmt: skip


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
    entry = _entry(source, Recipe(tokenizer, vocabulary))
    return HeldOut(source.name, entry.parts, entry.lengths)


def _source(
    path: str | os.PathLike[str] | None, column: str | None, *, held_out: bool = False
) -> Source:
    place = Path(path or "")
    is_of_hub = str(path).startswith(PREFIX)
    if path is not None and not is_of_hub and not os.path.exists(place):  # whatever the name
        raise ValueError(f"{place}: no such file or folder")
    files = _text_files(place) if path is not None and place.is_dir() else {}
    if path is not None and (is_of_hub or (not files and _is_dataset(place))):
        return _dataset_source(str(path), column, held_out)
    if column is not None:
        raise ValueError(f"--column: expected a text with columns, got {path or 'no --data'}")
    if path is None:
        return _embedded_source()
    if place.is_file():
        return _file_source(place.name, {TEXT if held_out else WHOLE: place})
    if not place.is_dir():
        raise ValueError(f"{place}: expected a file or a folder")
    return _file_source(place.resolve().name, _needed(files, str(place), held_out, ".txt"))


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
        if len(array) <= check_int("batch_size", batch_size):
            raise ValueError(
                f"batch_size: expected at least {batch_size + 1} tokens for a batch size of "
                f"{batch_size}, got {len(array)}"
            )
        self.batch_size = batch_size
        self.ignore_index = ignore_index
        self._tokens = array
        self._length = -(-(len(array) - 1) // batch_size)

    def __len__(self) -> int:
        """Number of time steps, L."""
        return self._length

    def window(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the ``t = min(length, L - start)`` time steps from ``start`` on:
        int64 [t, B], on the CPU.

        Raises:
            ValueError: ``start`` is outside [0, L) or ``length`` < 1.
        """
        check_int("start", start, 0, self._length - 1)
        steps = np.arange(start, min(start + check_int("length", length), self._length))
        place = steps[:, None] + self._length * np.arange(self.batch_size)
        beyond = place >= len(self._tokens) - 1
        place[beyond] = 0
        tokens, target = (self._tokens[at].astype(np.int64) for at in (place, place + 1))
        tokens[beyond], target[beyond] = 0, self.ignore_index
        return torch.from_numpy(tokens), torch.from_numpy(target)

    def windows(self, length: int, stop: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Consecutive windows of ``length`` time steps, of the first ``stop`` or all; the last may
        be shorter. Raises ValueError if ``length`` < 1."""
        check_int("length", length)
        end = self._length if stop is None else min(stop, self._length)
        return (self.window(start, min(length, end - start)) for start in range(0, end, length))
