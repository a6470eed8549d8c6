"""English text to words and back.

One tokenizer is used for every corpus that is not tokenized already. It has few rules, so that a
reader can predict what a model will see: text is lower-cased, a word is a run of letters,
digits and underscores that may be joined by inner apostrophes, hyphens and dots, and every other
visible character is a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

RULES_VERSION = 1  # increased when :func:`tokenize` changes, so that corpora are cached again

_TOKEN = re.compile(
    r"""
    (?: e\.g\. | i\.e\. | etc\. | vs\. | cf\. )(?!\w)       # abbreviations keep their dots
    | <unk> | <eos>                                         # markers of a prepared corpus
    | \d+ (?: [.,:] \d+ )*                                  # numbers, versions, times
    | [^\W\d]\w* (?: [.'-] [^\W_]\w* )* (?: \(\) )?         # words, dotted names, calls like f()
    | \.\.\. | --+
    | \S
    """,
    re.VERBOSE,
)
_STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
)
_SENTENCE_END = frozenset({".", "?", "!"})
_CLOSING = frozenset({")", "]", '"', "'"})
_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%") | {"...", "n't"}
_NO_SPACE_AFTER = frozenset("([{$#@")


def tokenize(text: str) -> list[str]:
    """Lower-cased words and punctuation marks of ``text``, in order.

    Example:
        >>> from hstree.lm.data.text import tokenize
        >>> tokenize("Don't call os.path.join() twice (see 3.11).")
        ["don't", 'call', 'os.path.join()', 'twice', '(', 'see', '3.11', ')', '.']
    """
    return _TOKEN.findall(text.translate(_STRAIGHT).lower())


def sentences(tokens: Iterable[str]) -> Iterator[list[str]]:
    """Split a token stream after full stops, question marks and exclamation marks (and the quotes
    that close them).

    Example:
        >>> from hstree.lm.data.text import sentences, tokenize
        >>> [len(s) for s in sentences(tokenize("It works. Does it? Yes"))]
        [3, 3, 1]
    """
    current: list[str] = []
    ended = False
    for token in tokens:
        if ended and token not in _CLOSING:
            yield current
            current = []
        ended = token in _SENTENCE_END or (ended and token in _CLOSING)
        current.append(token)
    if current:
        yield current


def detokenize(words: Iterable[str], end_of_sentence: str = "<eos>") -> str:
    """Readable text from tokens: no space before closing marks or after opening ones, a new line at
    each sentence end.

    Handles the conventions of :func:`tokenize` and of the Penn Treebank (``do n't``, ``company
    's``).

    Example:
        >>> from hstree.lm.data.text import detokenize
        >>> detokenize(["it", "does", "n't", "(", "yet", ")", "work", ".", "<eos>", "why", "?"])
        "it doesn't (yet) work.\\nwhy?"
    """
    pieces: list[str] = []
    glue = True
    quote_open = False
    for word in words:
        if word == end_of_sentence:
            pieces.append("\n")
            glue, quote_open = True, False
            continue
        closes = word in _NO_SPACE_BEFORE or (
            len(word) > 1 and word[0] == "'" and word[1:].isalpha()
        )
        if word == '"':
            closes, quote_open = quote_open, not quote_open
        if not glue and not closes:
            pieces.append(" ")
        pieces.append(word)
        glue = word in _NO_SPACE_AFTER or (word == '"' and quote_open)
    return "".join(pieces).strip("\n")
