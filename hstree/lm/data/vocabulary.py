"""The words of a corpus and their class ids."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hstree.lm._messages import quoted

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
