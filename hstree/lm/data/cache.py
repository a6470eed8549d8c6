"""Tokenized texts on disk, keyed by content.

An entry is a folder that is written under a temporary name and then renamed:

    tokens.bin        class ids, int32 little-endian: train, valid, test
    vocabulary.txt    as Vocabulary.save
    tokenizer.json    of Subwords only
    entry.json        format version, number of tokens, characters and bytes of each part, what the
                      tokenizer left out, CRC-32 of the other files and of itself

Its name is a SHA-256 of the content of the text, the tokenizer and the vocabulary. If the
vocabulary is made from the text, a small file whose name is a SHA-256 of content and settings holds
the name of the entry.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hstree._files import write_atomic

from .vocabulary import Vocabulary

FORMAT_VERSION = 3
TOKENS, VOCABULARY = "tokens.bin", "vocabulary.txt"
TOKENIZER, HEADER = "tokenizer.json", "entry.json"
TOKEN_TYPE = np.dtype("<i4")
_UNFINISHED = ".hstree-writing-"
_ABANDONED_AFTER = 24 * 3600.0  # seconds without a write
_BLOCK = 1 << 20


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


def key(*parts: str | bytes | int | None) -> str:
    digest = hashlib.sha256(f"hstree tokens {FORMAT_VERSION}".encode())
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
        if header["version"] != FORMAT_VERSION or {TOKENS, VOCABULARY} - checks.keys():
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
        "version": FORMAT_VERSION,
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


def publish(folder: Path, place: Path, is_sound: Callable[[Path], bool]) -> None:
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
        while block := file.read(_BLOCK):
            check = zlib.crc32(block, check)
    return check
