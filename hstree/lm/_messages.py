"""Parts of error messages: what was given, shortened, and what may have been meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_LIMIT = 80
_MOST = 3


def shortened(text: str, limit: int = _LIMIT) -> str:
    """The text, or its beginning and its length if it has more than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"


def quoted(value: object) -> str:
    """``repr``, shortened: values come from texts and files of others, and may be long."""
    if isinstance(value, str) and len(value) > _LIMIT:
        return f"{value[:_LIMIT]!r}... ({len(value):,} characters)"
    return shortened(repr(value))


def meant(name: str, known: Iterable[str]) -> str:
    """``; did you mean ...?`` with the known names that are spelled like ``name`` or abbreviated by
    it, such as ``--lr`` for ``--learning-rate``; empty if there is none.

    Example:
        >>> from hstree.lm._messages import meant
        >>> meant("--lr", ["--learning-rate", "--layers"])
        '; did you mean --learning-rate?'
    """
    if len(name) > _LIMIT:
        return ""
    by_word = {_word(other): other for other in known}
    word = _word(name)
    short = [other for other in by_word if len(word) > 1 and _initials(other) == word]
    close = difflib.get_close_matches(word, by_word, n=_MOST, cutoff=0.7)
    found = [by_word[other] for other in dict.fromkeys(short + close)][:_MOST]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _word(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _initials(word: str) -> str:
    return "".join(re.findall(r"\b[a-z]", word))
