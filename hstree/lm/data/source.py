"""Texts before tokenization: their location and how their lines are read."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias

SPLITS = ("train", "valid", "test")
HELD_OUT = ("valid", "test")
WHOLE, TEXT = "whole", "text"
_NAMES = {"train": "train", "valid": "valid|val|validation", "test": "test"}
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
    found = {split: _file(folder, split) for split in (HELD_OUT if held_out else SPLITS)}
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


def _file(folder: Path, split: str) -> Path | None:
    usual = folder / f"{split}.txt"
    if usual.is_file():
        return usual
    others = _named(folder, _NAMES[split])
    if len(others) > 1:
        raise ValueError(
            f"{folder}: expected one file for the part {split}, got "
            f"{', '.join(sorted(file.name for file in others))}; name one of them {usual.name}"
        )
    return others[0] if others else None


def has_texts(folder: Path) -> bool:
    """Whether a folder has any of the files of :func:`folder_source`."""
    return bool(_named(folder, "|".join(_NAMES.values())))


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
