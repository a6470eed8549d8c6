"""Trained models and their texts, for commands that read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hstree.data import Corpus, Tokenizer, Vocabulary
    from hstree.training import Run


def run_corpus(run: Run, data: str | None) -> Corpus:
    """The text at ``data`` in the words of a run; None: the text it was trained on, with a warning
    if that has changed.

    Raises:
        ValueError: there is no such text.
    """
    from hstree.training.checkpoint import trained_text

    corpus = run.corpus(data)
    if data is None and trained_text(run.path) not in (None, corpus.fingerprint()):
        print(
            f"hstree: {corpus.name} has changed since this run was trained on it", file=sys.stderr
        )
    return corpus


def prompt_words(
    prompt: str, vocabulary: Vocabulary, tokenizer: Tokenizer | None = None
) -> list[str]:
    """Words of a prompt: with a tokenizer its tokens, a line end being ``<eos>``; else pieces that
    the vocabulary holds stay as they are, others are tokenised as text files are."""
    from hstree.data import tokenize

    if tokenizer is not None:
        end = vocabulary.words[vocabulary.end]
        first, *others = tokenizer.split_batch(prompt.split("\n"))
        return [*first, *(token for line in others for token in (end, *line))]
    words: list[str] = []
    for piece in prompt.split():
        words.extend([piece] if piece in vocabulary else tokenize(piece))
    return words


def run_names(places: Sequence[str]) -> list[str]:
    """What to call runs, or files that stand beside them, in tables and pictures: their own names,
    or the paths as they were given where two names are alike.

    Raises:
        ValueError: a place is named twice.
    """
    resolved = [Path(place).resolve() for place in places]
    for place, path in zip(places, resolved, strict=True):
        if resolved.count(path) > 1:
            raise ValueError(f"{place}: expected every run and file once, got this one twice")
    names = [path.name for path in resolved]
    return names if len(set(names)) == len(names) else list(places)
