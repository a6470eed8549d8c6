"""What moved to :mod:`hstree.runs` and :mod:`hstree.data`, for commands that still ask here."""

from hstree.data import prompt_words
from hstree.runs import run_corpus, run_names

__all__ = ["prompt_words", "run_corpus", "run_names"]
