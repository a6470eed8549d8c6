"""Tokenization and its reverse."""

from __future__ import annotations

import unicodedata

import pytest

from hstree.lm.data import detokenize, sentences, tokenize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("One, two. a well-known fact", "one , two . a well-known fact"),
        ("Don't call os.path.join() now", "don't call os.path.join() now"),
        ("(e.g. 3.11, 1,000)", "( e.g. 3.11 , 1,000 )"),
        ("\u201cquoted\u201d it\u2019s... what?", '" quoted " it\'s ... what ?'),
        ("Grüße, Ελλάδα, a non\u2011breaking hyphen", "grüße , ελλάδα , a non-breaking hyphen"),
        ("<unk> a<b", "<unk> a < b"),
        ("of_x[0] != 'y' -- \"z\"; 50%!", "of_x [ 0 ] ! = ' y ' -- \" z \" ; 50 % !"),
    ],
)
def test_tokenize(text: str, expected: str) -> None:
    assert tokenize(text) == expected.split()


WRITTEN = {
    "Hindi": "दिल्ली में हिन्दी की बड़ी किताबें मिलती हैं और ज़्यादा पढ़ी जाती हैं",
    "Bengali": "আমি বাংলায় গান গাই এবং কলকাতায় থাকি",
    "Arabic": "كَتَبَ الطَّالِبُ الدَّرْسَ فِي المَدْرَسَةِ",
    "Hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם עַל־פְּנֵי צה״ל",
    "Vietnamese": "tiếng việt được viết bằng chữ quốc ngữ",
    "Persian": "می\u200cخواهم کتاب\u200cها را بخوانم",  # noqa: RUF001
    "Sinhala": "ශ්\u200dරී ලංකාව",
    "Catalan": "la col·lega paral·lela",
    "soft hyphens": "co\u00adope\u00adrate non\u2060breaking",
    "several marks": "a\u0327\u0301\u0300 b\u0330\u0308x q\u0307_2\u0301 \u0301\u0302 i\u0307st",
    "marks at a symbol": "☺\ufe0f ←\u0338 1\ufe0f\u20e3 2\u0305 👍\U0001f3fd 👩\u200d👩\u200d👧",
}


@pytest.mark.parametrize("language", WRITTEN)
def test_marks_belong_to_their_word(language: str) -> None:
    """Words are those between spaces, composed or not, and so is what is generated of them."""
    text = unicodedata.normalize("NFC", WRITTEN[language])
    words = text.split(" ")
    for form in ("NFC", "NFD"):
        assert tokenize(unicodedata.normalize(form, text)) == words
        assert tokenize(unicodedata.normalize(form, f"({text}), {text}!")) == [
            *("(", *words, ")", ",", *words, "!")
        ]
    assert detokenize(tokenize(text)) == text


def test_sentences_end_after_closing_marks() -> None:
    found = list(sentences(tokenize("He left (at once.) Why? No end")))
    assert [" ".join(words) for words in found] == ["he left ( at once . )", "why ?", "no end"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ""),
        ("a , b .", "a, b."),
        ("it does n't 's ' x", "it doesn't's ' x"),
        ("( a ) b", "(a) b"),
        ('" a b " c', '"a b" c'),
        ("a <eos> b <eos>", "a\nb"),
        ("क । ب ، ب ؟", "क। ب، ب؟"),
    ],
)
def test_detokenize(words: str, expected: str) -> None:
    assert detokenize(words.split()) == expected
