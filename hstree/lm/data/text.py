"""Text to words and back.

One tokenizer is used for every corpus that is not tokenized already. It has few rules, so that a
reader can predict what a model will see: text is lower-cased and normalized (Unicode NFC), a word
is a run of letters, digits and underscores that may be joined by inner apostrophes, hyphens and
dots, and every other visible character is a token. What extends the character before it, such as
an accent or a vowel sign, belongs to the token of that character. Scripts that write no spaces
between words need another tokenizer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain

RULES_VERSION = 2  # increased when :func:`tokenize` changes, so that corpora are cached again

_MODIFIERS = range(0x1F3FB, 0x1F400)  # the colors of emoji
_INNER = r".'\u00b7\u05be\u05f3\u05f4-"  # of words: also the Catalan dot, Hebrew hyphen and quotes
_SPACE = 0x200B  # a format character in name only: it ends a word


@cache
def _pattern() -> re.Pattern[str]:
    """X stands for what extends the character before it: marks, and format characters such as the
    joiners and the soft hyphen. (Word boundaries of Unicode, UAX #29, rule WB4.)"""
    extends = {"Mn", "Mc", "Me", "Cf"}
    codes = chain([0xAD], range(0x300, 0x20000), range(0xE0000, 0xE0200))  # where there are some
    found = (chr(c) for c in codes if unicodedata.category(chr(c)) in extends and c != _SPACE)
    x = "".join(chain(found, map(chr, _MODIFIERS)))
    rules = r"""
    (?: e\.g\. | i\.e\. | etc\. | vs\. | cf\. )(?![\wX])     # abbreviations keep their dots
    | <unk> | <eos>                                         # markers of a prepared corpus
    | \d+[X]* (?: [.,:] \d+[X]* )*                          # numbers, versions, times
    | [^\W\d][\wX]* (?: [INNER] [^\W_][\wX]* )* (?: \(\) )?  # words, dotted names, calls like f()
    | \.\.\. | --+
    | \S[X]* (?: (?<=\u200d) \S[X]* )*                      # a joiner joins emoji
    """
    return re.compile(rules.replace("INNER", _INNER).replace("X", x), re.VERBOSE)


_STRAIGHT = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
    | dict.fromkeys("\u2010\u2011\u2013\u2014", "-")
)
_SENTENCE_END = frozenset({".", "?", "!"})
_CLOSING = frozenset({")", "]", '"', "'"})
_ABROAD = "\u0964\u0965\u060c\u061b\u061f"  # dandas; comma, semicolon, question mark of Arabic
_NO_SPACE_BEFORE = frozenset(".,;:!?)]}%" + _ABROAD) | {"...", "n't"}
_NO_SPACE_AFTER = frozenset("([{$#@")


def tokenize(text: str) -> list[str]:
    """Lower-cased, normalized words and punctuation marks of ``text``, in order.

    Example:
        >>> from hstree.lm.data.text import tokenize
        >>> tokenize("Don't call os.path.join() twice (see 3.11).")
        ["don't", 'call', 'os.path.join()', 'twice', '(', 'see', '3.11', ')', '.']
    """
    text = unicodedata.normalize("NFC", text.translate(_STRAIGHT).lower())
    return _pattern().findall(text)


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
