"""Corpora, vocabularies, tokenizers and batches."""

from .batching import Streams
from .cache import Length
from .corpus import Corpus, HeldOut
from .embedded import embedded_corpus
from .load import load_corpus, load_held_out
from .statistics import CorpusStatistics
from .text import detokenize, sentences, tokenize
from .tokenizer import Subwords, Tokenizer, WhiteSpace, Words, learn_bpe, prompt_words
from .vocabulary import Vocabulary

__all__ = [
    "Corpus",
    "CorpusStatistics",
    "HeldOut",
    "Length",
    "Streams",
    "Subwords",
    "Tokenizer",
    "Vocabulary",
    "WhiteSpace",
    "Words",
    "detokenize",
    "embedded_corpus",
    "learn_bpe",
    "load_corpus",
    "load_held_out",
    "prompt_words",
    "sentences",
    "tokenize",
]
