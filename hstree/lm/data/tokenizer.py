"""Tokenizers: lines of text to tokens, and tokens back to text."""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from hstree.lm._packages import optional_package

from .text import RULES_VERSION, detokenize, tokenize
from .vocabulary import END, UNKNOWN, Vocabulary

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
        self._words = {number: _name(token, number) for token, number in vocabulary.items()}
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


def _name(token: str, number: int) -> str:
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
