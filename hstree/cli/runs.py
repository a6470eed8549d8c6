"""Trained models and their texts, for commands that read them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hstree.data import Corpus
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
