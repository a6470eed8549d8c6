"""Tokenisation and its reverse."""

from __future__ import annotations

import pytest

from hstree.lm.data import detokenize, sentences, tokenize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("One, two.", ["one", ",", "two", "."]),
        ("Don't stop", ["don't", "stop"]),
        ("a well-known fact", ["a", "well-known", "fact"]),
        ("call os.path.join() now", ["call", "os.path.join()", "now"]),
        ("(e.g. 3.11, 1,000)", ["(", "e.g.", "3.11", ",", "1,000", ")"]),
        ("\u201cquoted\u201d it\u2019s", ['"', "quoted", '"', "it's"]),
        ("wait... what?", ["wait", "...", "what", "?"]),
        ("Grüße, Ελλάδα", ["grüße", ",", "ελλάδα"]),
        ("<unk> a<b", ["<unk>", "a", "<", "b"]),
    ],
)
def test_tokenize(text: str, expected: list[str]) -> None:
    assert tokenize(text) == expected


def test_no_visible_character_is_lost() -> None:
    text = "A (strange) mix: 50% of_x[0] != 'y' -- \"z\"; end!"
    assert "".join(tokenize(text)) == "".join(text.lower().split())


def test_sentences_end_after_closing_marks() -> None:
    found = list(sentences(tokenize("He left (at once.) Why? No end")))
    assert [" ".join(words) for words in found] == ["he left ( at once . )", "why ?", "no end"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ""),
        (["a", ",", "b", "."], "a, b."),
        (["it", "does", "n't", "'s"], "it doesn't's"),
        (["(", "a", ")", "b"], "(a) b"),
        (['"', "a", "b", '"', "c"], '"a b" c'),
        (["a", "<eos>", "b", "<eos>"], "a\nb"),
    ],
)
def test_detokenize(words: list[str], expected: str) -> None:
    assert detokenize(words) == expected
