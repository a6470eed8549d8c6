"""A corpus by its path, whatever kind of text lies there."""

from __future__ import annotations

import os
from pathlib import Path

from .corpus import Corpus, load_folder, load_text
from .embedded import embedded_corpus
from .vocabulary import Vocabulary


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    min_count: int | None = None,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Corpus:
    """The corpus at ``path``: a folder (:func:`load_folder`), a text file (:func:`load_text`), or,
    for None, the embedded corpus (:func:`hstree.data.embedded_corpus`).

    ``min_count`` None is 1 for what is tokenised already and 2 for a text file. With a
    ``vocabulary`` the corpus is encoded by it, and ``min_count`` and ``max_vocabulary`` have no
    effect.

    Raises:
        ValueError: ``path`` does not exist, or what the loaders raise.
    """
    if path is None:
        return embedded_corpus(
            min_count=min_count or 1, max_vocabulary=max_vocabulary, vocabulary=vocabulary
        )
    source = Path(path)
    if source.is_dir():
        return load_folder(
            source, min_count=min_count or 1, max_vocabulary=max_vocabulary, vocabulary=vocabulary
        )
    if not source.exists():
        raise ValueError(f"{source}: no such file or folder")
    return load_text(
        source, min_count=min_count or 2, max_vocabulary=max_vocabulary, vocabulary=vocabulary
    )
