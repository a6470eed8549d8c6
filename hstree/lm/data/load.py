"""A corpus by its path, for every kind of text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from .corpus import Corpus, HeldOut, corpus_of
from .embedded import embedded_source
from .hugging_face import PREFIX, dataset_source, is_dataset
from .source import WHOLE, Source, file_source, folder_source, has_texts
from .tokenization import Settings, entry_of
from .tokenizer import BPE, Subwords, Tokenizer, WhiteSpace, Words, check_bpe_size
from .vocabulary import Vocabulary


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
    - A text file, or a pipe: lower-cased words and punctuation marks
      (:func:`hstree.lm.data.tokenize`), empty lines skipped. The first 90% of the tokens are the
      training part, the next 5% the validation part and the last 5% the test part.
    - What the package ``datasets`` reads: a JSON Lines, JSON, CSV, TSV or Parquet file or a
      compressed text (gz, zst, bz2, xz); a folder of such files, of which the paths may name the
      parts (``train-0001.jsonl``, ``dev.jsonl``, ``test/0001.jsonl``); a folder that its
      ``save_to_disk`` wrote; ``hf:NAME[:CONFIG]``, a dataset of the hub. Three parts are read as a
      folder of texts is, and one as a text file, with one line per row.
    - None: the embedded corpus (:func:`hstree.lm.data.embedded_corpus`).

    Words of the validation and test part that are not in the vocabulary become ``<unk>``.

    The ids are in a memory-mapped file: in the cache (``hstree.lm.data.cache``), which is used
    again for the same text, tokenizer and settings, or in a temporary file.

    Args:
        path: path or name of the text.
        column: the column of text of a dataset. None: the only one, or ``text``.
        min_count: words that occur fewer times in the training part become ``<unk>``. None: 2 for
            the words of a single text file, else 1.
        max_vocabulary: largest number of classes, ``<unk>`` and ``<eos>`` included.
        vocabulary: use this vocabulary; ``min_count`` and ``max_vocabulary`` are then ignored.
        tokenizer: path of a ``tokenizer.json`` of the package ``tokenizers``; or ``"bpe"``,
            byte-pair encoding learned from the training part (of a single text: its first 90%)
            with ``max_vocabulary`` classes; or any tokenizer. None: split at white space, or into
            lower-cased words for a single text and the embedded corpus.

    Raises:
        ValueError: ``path`` does not exist, a part is missing, empty, too short or not UTF-8, the
            column is missing, the vocabulary has fewer than two words, or a package is missing.
    """
    splitter = None if tokenizer is None else _tokenizer(tokenizer, max_vocabulary)
    source = _source(path, column)
    if splitter is None:
        splitter = Words() if path is None or WHOLE in source.parts else WhiteSpace()
    if min_count is None:
        min_count = 2 if path is not None and isinstance(splitter, Words) else 1
    return corpus_of(source, Settings(splitter, min_count, max_vocabulary, vocabulary))


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
    entry = entry_of(source, Settings(tokenizer, vocabulary=vocabulary))
    return HeldOut(source.name, entry.parts, entry.lengths)


def _source(
    path: str | os.PathLike[str] | None, column: str | None, *, held_out: bool = False
) -> Source:
    place = Path(path or "")
    if path is not None and os.fspath(path).startswith(PREFIX):
        return dataset_source(os.fspath(path), column, held_out=held_out)
    if path is not None and not os.path.exists(place):  # whatever the name
        raise ValueError(f"{place}: no such file or folder")
    texts = path is not None and place.is_dir() and has_texts(place)
    if path is not None and not texts and is_dataset(place):
        return dataset_source(str(place), column, held_out=held_out)
    if column is not None:
        raise ValueError(f"--column: expected a text with columns, got {path or 'no --data'}")
    if path is None:
        return embedded_source()
    read = folder_source if place.is_dir() else file_source
    return read(place, held_out=held_out)


def _tokenizer(
    tokenizer: str | Tokenizer, max_vocabulary: int | None
) -> Tokenizer | Literal["bpe"]:
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == BPE:
        check_bpe_size(max_vocabulary)
        return "bpe"
    return Subwords.load(tokenizer)
