"""Statistics of a corpus for the construction of heads: class frequencies and word vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hstree.trees import word_vectors
from hstree.trees.vectors import count_classes


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
