"""Corpora, vocabularies and batches. Nothing here knows of heads or models."""

from .batching import batchify, windows
from .corpus import Corpus, load_folder, load_text
from .embedded import embedded_corpus
from .load import load_corpus
from .statistics import CorpusStatistics
from .text import detokenize, sentences, tokenize
from .vocabulary import Vocabulary

__all__ = [
    "Corpus",
    "CorpusStatistics",
    "Vocabulary",
    "batchify",
    "detokenize",
    "embedded_corpus",
    "load_corpus",
    "load_folder",
    "load_text",
    "sentences",
    "tokenize",
    "windows",
]
