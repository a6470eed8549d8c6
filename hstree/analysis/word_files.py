"""Word-similarity sets and word vectors, read from files in the formats in which people hand them
round."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

SUFFIXES = (".txt", ".csv", ".tsv", ".tab")

# Parts of speech between the words and the score, as in SimLex-999 and SimVerb-3500.
_PARTS_OF_SPEECH = frozenset({"a", "adj", "adv", "j", "n", "noun", "r", "v", "verb"})
# Their marks at the end of words, as in the lemma form of MEN: sun-n.
_MARKS = ("-a", "-j", "-n", "-r", "-v")


@dataclass(frozen=True)
class SimilaritySet:
    """Pairs of words and how similar people found them, on any scale."""

    name: str
    pairs: tuple[tuple[str, str], ...]
    scores: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.pairs) != len(self.scores):
            raise ValueError(
                f"scores: expected one for each of {len(self.pairs)} pairs, got {len(self.scores)}"
            )


@dataclass(frozen=True)
class Embeddings:
    """Vectors of words.

    Attributes:
        name: what people call them.
        index: row of each word.
        vectors: [n, D].
    """

    name: str
    index: Mapping[str, int]
    vectors: npt.NDArray[np.float32]

    def row(self, word: str) -> int | None:
        """Row of a word as it is written, else of the word in lower case; None if it has none, or a
        vector of zeros, which has no direction."""
        row = self.index.get(word)
        if row is None:
            row = self.index.get(word.lower())
        return None if row is None or not self.vectors[row].any() else row


def read_similarity_set(path: str | os.PathLike[str]) -> SimilaritySet:
    """A word-similarity set of any of the usual distributions.

    UTF-8; a pair on each line: two words, a part of speech or none, the mean score, and whatever
    other columns (those of single judges, for instance), which are not read. Columns are separated
    by tabs, else semicolons, else commas (quotes as in CSV), else other white space. Empty lines
    and lines that begin with # are left out, and a first line without a score, the header. Where
    every word ends with a mark of its part of speech (``sun-n``), the marks are taken off. The name
    is that of the file, without its ending and the prefix ``EN-``.

    This reads WS-353 (``combined.csv``, ``combined.tab``, the similarity and relatedness parts),
    RG-65, MC-30, MTurk-287, MTurk-771, MEN in natural and lemma form, YP-130, VERB-143,
    RW-STANFORD, SimLex-999 and SimVerb-3500.

    Raises:
        ValueError: there is no such file, it is not UTF-8, has no pairs, or a line is not a pair:
            the message names file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: expected UTF-8 text, but byte {error.start} is not") from None
    pairs: list[tuple[str, str]] = []
    scores: list[float] = []
    header_may_come = True
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fields = _fields(line.strip())
        score = _score(fields)
        if score is not None:
            pairs.append((fields[0], fields[1]))
            scores.append(score)
        elif not (header_may_come and len(fields) > 2):
            raise ValueError(
                f"{file}, line {number}: expected word1 word2 score, got {line.strip()[:60]!r}"
            )
        header_may_come = False
    if not pairs:
        raise ValueError(f"{file}: expected lines word1 word2 score, got none")
    return SimilaritySet(file.stem.removeprefix("EN-"), _without_marks(pairs), tuple(scores))


def _fields(line: str) -> list[str]:
    for separator in "\t;,":
        if separator in line:
            row = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            return [field.strip() for field in row]
    return line.split()


def _score(fields: Sequence[str]) -> float | None:
    """The score of a pair; None if these fields are none."""
    if len(fields) < 3 or not (fields[0] and fields[1]):
        return None
    has_part = len(fields) > 3 and fields[2].lower() in _PARTS_OF_SPEECH
    try:
        score = float(fields[3 if has_part else 2])
    except ValueError:
        return None
    return score if math.isfinite(score) else None


def _without_marks(pairs: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    if not all(len(word) > 2 and word.endswith(_MARKS) for pair in pairs for word in pair):
        return tuple(pairs)
    return tuple((first[:-2], second[:-2]) for first, second in pairs)


def read_similarity_sets(path: str | os.PathLike[str]) -> tuple[SimilaritySet, ...]:
    """The sets in the files of a folder that end in .txt, .csv, .tsv or .tab, in alphabetical
    order; or the one in a file.

    Raises:
        ValueError: there is no such file or folder, no such file in the folder, two sets of the
            same name, or :func:`read_similarity_set` fails.
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"{place}: no such file or folder")
    if not place.is_dir():
        return (read_similarity_set(place),)
    files = sorted(file for file in place.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{place}: expected files that end in {', '.join(SUFFIXES)}, got none")
    sets = tuple(read_similarity_set(file) for file in files)
    names = [each.name for each in sets]
    for file, name in zip(files, names, strict=True):
        if names.count(name) > 1:
            raise ValueError(f"{file}: another file of this folder holds a set {name!r} too")
    return sets


def read_embeddings(
    path: str | os.PathLike[str], wanted: Collection[str], name: str | None = None
) -> Embeddings:
    """Vectors of some words from a text file in the format of word2vec or GloVe.

    A word and its D numbers on each line, separated by spaces; word2vec and fastText write a first
    line ``V D``. A file of any size takes little memory, since only vectors of wanted words are
    kept; of a word that occurs twice, the first.

    Args:
        path: the file.
        wanted: words whose vectors are to be read, each also in lower case.
        name: what to call them; None: the file's name.

    Raises:
        ValueError: there is no such file, it is empty, or the line of a wanted word does not hold D
            finite numbers: the message names file and line.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: no such file")
    missing = {form.encode() for word in wanted for form in (word, word.lower())}
    index: dict[str, int] = {}
    rows: list[npt.NDArray[np.float32]] = []
    with file.open("rb") as stream:  # bytes: only what is wanted need be UTF-8
        first = stream.readline().split()
        header = len(first) == 2 and all(field.isdigit() for field in first)
        size = int(first[1]) if header else len(first) - 1
        if size < 1:
            raise ValueError(f"{file}, line 1: expected a word and its vector, or V and D")
        if not header:
            stream.seek(0)
        for number, line in enumerate(stream, start=2 if header else 1):
            if line.split(None, 1)[:1] and line.split(None, 1)[0] in missing:
                fields = line.rsplit(None, size)  # words of GloVe may hold spaces
                if fields[0].strip() not in missing:
                    continue
                rows.append(_vector(fields[1:], size, f"{file}, line {number}"))
                index[fields[0].strip().decode()] = len(index)
                missing.remove(fields[0].strip())
    vectors = np.stack(rows) if rows else np.zeros((0, size), np.float32)
    return Embeddings(file.name if name is None else name, index, vectors)


def _vector(fields: Sequence[bytes], size: int, where: str) -> npt.NDArray[np.float32]:
    try:
        vector = np.array([float(field) for field in fields], np.float32)
    except ValueError:
        vector = np.array([], np.float32)
    if len(vector) != size or not np.isfinite(vector).all():
        raise ValueError(f"{where}: expected a word and {size} finite numbers")
    return vector
