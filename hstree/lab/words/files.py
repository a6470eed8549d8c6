"""Word-similarity sets and word vectors, read from files in their usual formats."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SUFFIXES = (".txt", ".csv", ".tsv", ".tab")

# Parts of speech between the words and the score, as in SimLex-999 and SimVerb-3500.
_PARTS_OF_SPEECH = frozenset({"a", "adj", "adv", "j", "n", "noun", "r", "v", "verb"})
# Part-of-speech suffixes of words, as in the lemma form of MEN: sun-n.
_MARKS = ("-a", "-j", "-n", "-r", "-v")


Pair = tuple[str, str, float]
"""Two words and their human similarity score, on any scale."""


@dataclass(frozen=True)
class Embeddings:
    """Vectors [n, D] of words, the row of each word, and the name of the vectors."""

    name: str
    index: Mapping[str, int]
    vectors: npt.NDArray[np.float32]

    def row(self, word: str) -> int | None:
        """The row of a word as written, otherwise of the word in lower case. None if there is none,
        or if its vector is 0, which has no direction."""
        row = self.index.get(word, self.index.get(word.lower()))
        return None if row is None or not self.vectors[row].any() else row

    def cosine(self, first: str, second: str) -> float:
        """Cosine similarity of two words; nan if one has no :meth:`row`."""
        i, j = self.row(first), self.row(second)
        if i is None or j is None:
            return math.nan
        a, b = self.vectors[[i, j]].astype(np.float64)
        return float((a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)))


def read_similarity_sets(path: str | os.PathLike[str]) -> dict[str, tuple[Pair, ...]]:
    """Read word-similarity sets in any of the usual formats, by name: from a folder, all files that
    end in .txt, .csv, .tsv or .tab, in alphabetical order, or from one file.

    Files are in UTF-8, with one pair on each line: two words, an optional part of speech, the mean
    score, and any other columns, which are ignored (such as the scores of single judges). Columns
    are separated by tabs, otherwise semicolons, otherwise commas (with CSV quotes), otherwise other
    white space. Empty lines, lines that begin with #, and a header line without a score are
    skipped. If every word ends with its part of speech (``sun-n``), this suffix is removed. The
    name of a set is that of its file, without extension and the prefix ``EN-``.

    This reads WS-353 (``combined.csv``, ``combined.tab``, the similarity and relatedness parts),
    RG-65, MC-30, MTurk-287, MTurk-771, MEN in natural and lemma form, YP-130, VERB-143,
    RW-STANFORD, SimLex-999 and SimVerb-3500.

    Raises:
        ValueError: the file or folder does not exist, the folder has no such file, or two sets have
            the same name; a file is not UTF-8, has no pairs, or a line is not a pair. The message
            names file and line.
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{place}: no such file or folder")
    files = [place]
    if place.is_dir():
        files = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{place}: expected files that end in {', '.join(SUFFIXES)}, got none")
    sets: dict[str, tuple[Pair, ...]] = {}
    for file in files:
        name = file.stem.removeprefix("EN-")
        if name in sets:
            raise ValueError(f"{file}: another file of this folder also has a set named {name!r}")
        sets[name] = _read_set(file)
    return sets


def _read_set(file: Path) -> tuple[Pair, ...]:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, but byte {error.start} is not") from None
    pairs: list[Pair] = []
    header_may_come = True
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        fields = _fields(line)
        pair = _pair(fields)
        if pair is not None:
            pairs.append(pair)
        elif not (header_may_come and len(fields) > 2):
            raise ValueError(
                f"{file}, line {number}: expected word1 word2 score, got {line[:60]!r}"
            )
        header_may_come = False
    if not pairs:
        raise ValueError(f"{file}: expected lines word1 word2 score, got none")
    if all(len(word) > 2 and word.endswith(_MARKS) for *pair, _ in pairs for word in pair):
        pairs = [(first[:-2], second[:-2], score) for first, second, score in pairs]
    return tuple(pairs)


def _fields(line: str) -> list[str]:
    for separator in "\t;,":
        if separator in line:
            row = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            return [field.strip() for field in row]
    return line.split()


def _pair(fields: list[str]) -> Pair | None:
    """The pair, or None if these fields are not one."""
    has_part = len(fields) > 3 and fields[2].lower() in _PARTS_OF_SPEECH
    try:
        first, second, score = *fields[:2], float(fields[3 if has_part else 2])
    except (IndexError, ValueError):
        return None
    return (first, second, score) if first and second and math.isfinite(score) else None


def read_embeddings(
    path: str | os.PathLike[str], wanted: Collection[str], name: str | None = None
) -> Embeddings:
    """Read the vectors of some words from a text file in the format of word2vec or GloVe.

    Each line has a word and its D numbers, separated by spaces; word2vec and fastText add a first
    line ``V D``. Only the requested vectors are kept in memory, so files may have any size. If a
    word occurs twice, its first vector is used.

    Args:
        path: path of the file.
        wanted: words whose vectors to read, each also in lower case.
        name: name of the vectors; None: the name of the file.

    Raises:
        ValueError: the file does not exist or is empty, or the line of a requested word does not
            have D finite numbers. The message names file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    missing = {form.encode() for word in wanted for form in (word, word.lower())}
    found: dict[str, npt.NDArray[np.float32]] = {}
    with file.open("rb") as stream:  # bytes: only the requested words must be UTF-8
        first = stream.readline().split()
        header = len(first) == 2 and all(field.isdigit() for field in first)
        size = int(first[1]) if header else len(first) - 1
        if size < 1:
            raise ValueError(f"{file}, line 1: expected a word and its vector, or V and D")
        if not header:
            stream.seek(0)
        for number, line in enumerate(stream, start=2 if header else 1):
            if not missing.intersection(line.split(None, 1)[:1]):
                continue
            text, *fields = line.rsplit(None, size)  # words of GloVe may contain spaces
            word = text.strip()
            if word not in missing:
                continue
            try:
                vector = np.array([float(field) for field in fields], np.float32)
            except ValueError:
                vector = np.array([], np.float32)
            if len(vector) != size or not np.isfinite(vector).all():
                raise ValueError(
                    f"{file}, line {number}: expected a word and {size} finite numbers"
                )
            found[word.decode()] = vector
            missing.remove(word)
    index = {word: row for row, word in enumerate(found)}
    vectors = np.array([*found.values()], np.float32).reshape(-1, size)
    return Embeddings(file.name if name is None else name, index, vectors)
