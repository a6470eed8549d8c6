"""A corpus by its path, for every kind of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .corpus import Corpus, Settings, corpus_of
from .embedded import embedded_source
from .hugging_face import PREFIX, dataset_source, is_saved_dataset, parse_dataset
from .source import Source, file_source, folder_source
from .tokenizer import BPE, Subwords, Tokenizer, WhiteSpace, Words, check_bpe_size
from .vocabulary import Vocabulary


def load_corpus(
    path: str | os.PathLike[str] | None = None,
    *,
    min_count: int | None = None,
    max_vocabulary: int | None = None,
    vocabulary: Vocabulary | None = None,
    tokenizer: str | Tokenizer | None = None,
) -> Corpus:
    """The corpus at ``path``.

    A folder with train.txt, valid.txt and test.txt (:func:`hstree.data.load_folder`), a text file
    (:func:`hstree.data.load_text`), a dataset of the package ``datasets``
    (``hf:NAME[:CONFIG[:COLUMN]]``, or a folder that its ``save_to_disk`` wrote), or, for None, the
    embedded corpus (:func:`hstree.data.embedded_corpus`).

    The ids are in a memory-mapped file: in the cache (``hstree.data.cache``), which is used
    again for the same text, tokenizer and settings, or in a temporary file.

    Args:
        path: path or name of the text.
        min_count: words that occur fewer times in the training part become ``<unk>``. None: 2 for
            the words of a single text file, else 1.
        max_vocabulary: largest number of classes, ``<unk>`` and ``<eos>`` included.
        vocabulary: use this vocabulary; ``min_count`` and ``max_vocabulary`` are then ignored.
        tokenizer: path of a ``tokenizer.json`` of the package ``tokenizers``; or ``"bpe"``,
            byte-pair encoding learned from the training part (of a single text file: its first 90%)
            with ``max_vocabulary`` classes; or any tokenizer. None: split at white space, or into
            lower-cased words for a single text file.

    Raises:
        ValueError: ``path`` does not exist, a package is missing, or an error of the loaders.
    """
    source, words = _source(path)
    splitter = words if tokenizer is None else _tokenizer(tokenizer, max_vocabulary)
    if min_count is None:
        min_count = 2 if path is not None and isinstance(splitter, Words) else 1
    return corpus_of(source, Settings(splitter, min_count, max_vocabulary, vocabulary))


def _source(path: str | os.PathLike[str] | None) -> tuple[Source, Tokenizer]:
    """The text, and its default tokenizer."""
    if path is None:
        return embedded_source(), WhiteSpace()
    if isinstance(path, str) and path.startswith(PREFIX):
        return parse_dataset(path), WhiteSpace()
    place = Path(path)
    if place.is_dir():
        saved = is_saved_dataset(place)
        return dataset_source(str(place)) if saved else folder_source(place), WhiteSpace()
    if not place.exists():
        raise ValueError(f"{place}: no such file or folder")
    return file_source(place), Words()


def _tokenizer(
    tokenizer: str | Tokenizer, max_vocabulary: int | None
) -> Tokenizer | Literal["bpe"]:
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == BPE:
        check_bpe_size(max_vocabulary)
        return "bpe"
    return Subwords.load(tokenizer)
